"""Nodes that run a model over finished trajectories."""
