"""Several rewards as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Sample
from flowrl.node import Node
from flowrl.nodes._backend.coefficients import refusal


class WeightedSum(Node):
    """Add rewards up; a trajectory that any of them could not score is unscored, since a part of a sum is no sum."""

    coefficients: list[float] | None = Field(None, min_length=1)
    """Factor of each reward, in the order of `reads: {rewards: [...]}`; all 1 when left out."""

    class Out(NamedTuple):
        reward: Sample[float]

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        return refusal(self.coefficients, reads.get("rewards", ()))

    def run(self, rewards: list[Sample[float]]) -> Out:
        coefficients = [1.0] * len(rewards) if self.coefficients is None else self.coefficients
        parts = np.stack([reward.values for reward in rewards]).astype(np.float64)
        return self.Out(Sample(rewards[0].rows, np.asarray(coefficients) @ parts))
