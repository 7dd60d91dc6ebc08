"""Several rewards as one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowrl.batch import Sample
from flowrl.node import Node


class WeightedSum(Node):
    """Add rewards up; a trajectory that any of them could not score is unscored, since a part of a sum is no sum."""

    coefficients: list[float] | None = None
    """Factor of each reward, in the order of `reads: {rewards: [...]}`; all 1 when left out."""

    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, rewards: list[Sample[float]]) -> Out:
        coefficients = [1.0] * len(rewards) if self.coefficients is None else self.coefficients
        if not rewards or len(coefficients) != len(rewards):
            raise ValueError(f"{len(coefficients)} coefficients for {len(rewards)} rewards: give one for each")
        parts = np.stack([reward.values for reward in rewards]).astype(np.float64)
        return self.Out(Sample(rewards[0].rows, np.asarray(coefficients) @ parts))
