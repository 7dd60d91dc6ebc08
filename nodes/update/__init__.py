"""Nodes that change a model's weights."""
