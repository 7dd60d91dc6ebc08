"""A reward that prefers short responses."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from flowrl.batch import Sample, Token
from flowrl.node import Node


class LengthPenalty(Node):
    """Lower the reward in proportion to the share of the token budget used; unscored stays unscored."""

    budget: int = Field(1024, ge=1)
    """Tokens of the model at which the whole penalty is due."""
    scale: float = Field(0.1, ge=0)
    """Penalty of a response that uses the budget up."""

    class Out(NamedTuple):
        shaped_reward: Sample[float]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        return self.Out(reward - self.scale * response_mask.sum("sample") / self.budget)
