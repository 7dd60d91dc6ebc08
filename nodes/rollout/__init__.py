"""Nodes that make trajectories."""
