"""Nodes that say what of a rollout is worth training on, and how much it counts."""
