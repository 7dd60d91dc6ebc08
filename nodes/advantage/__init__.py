"""Nodes that turn rewards into advantages."""
