"""A node class that breaks a rule: what `run` reads has no type."""

from flowrl import Node


class Broken(Node):
    def run(self, reward):
        return reward
