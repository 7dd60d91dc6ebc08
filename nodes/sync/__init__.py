"""Nodes that carry trained weights to the engines that generate with them."""
