"""Nodes that judge trajectories."""
