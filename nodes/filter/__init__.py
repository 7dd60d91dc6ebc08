"""Nodes that choose which trajectories are trained on."""
