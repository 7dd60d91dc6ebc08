"""Nodes that measure a model without training it."""
