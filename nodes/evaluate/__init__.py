"""Nodes that judge a model on data that nothing trains on."""
