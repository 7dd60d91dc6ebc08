"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Sample
from flowrl.node import Node


class WeightedSum(Node):
    """Add rewards up; a trajectory that any of them could not score is unscored, since a part of a sum is no sum."""

    coefficients: list[float] | None = Field(None, min_length=1)
    """Factor of each reward, in the order of `reads: {rewards: [...]}`; all 1 when left out."""

    class Out(NamedTuple):
        reward: Sample[float]

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        num_rewards = len(reads.get("rewards", ()))
        if num_rewards == 0 or len(self.coefficients or reads["rewards"]) != num_rewards:
            return f"{len(self.coefficients or ())} coefficients for {num_rewards} rewards: give one for each"
        return ""

    def run(self, rewards: list[Sample[float]]) -> Out:
        coefficients = [1.0] * len(rewards) if self.coefficients is None else self.coefficients
        parts = np.stack([reward.values for reward in rewards]).astype(np.float64)
        return self.Out(Sample(rewards[0].rows, np.asarray(coefficients) @ parts))
