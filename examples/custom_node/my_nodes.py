"""A reward shaping of one's own: about fifteen lines, no registration, no trainer to edit."""

from typing import NamedTuple

from flowrl import Node, Sample, Token


class LengthPenalty(Node):
    """Lower the reward in proportion to the share of the token budget used."""

    budget: int = 1024
    scale: float = 0.1

    class Out(NamedTuple):
        shaped_reward: Sample[float]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        return self.Out(reward - self.scale * response_mask.sum("sample") / self.budget)
