"""Advantages of several rewards, each compared within its group before they are added up.

Source: Liu et al., "GDPO: Group reward-Decoupled Normalization Policy Optimization", arXiv:2601.05242:

    A_i = sum over rewards k of coefficient_k * (r_ki - mean of r_k) / std of r_k    over the group

A sum of rewards that is compared afterwards, as by `reward.weighted_sum` and `advantage.grpo`, cannot tell 1 + 0 from
0 + 1, and is ruled by the reward that varies most. `whiten` divides by the deviation over the sessions of the batch,
which otherwise grows with the number of rewards. We depart from it where a group tells nothing under any reward: it
gives exactly 0 and is left out of the batch's statistics; and a session that any reward could not score is left out of
all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Sample, Token
from flowrl.nodes._backend.coefficients import refusal
from flowrl.nodes._backend.comparing import Scores, of_sessions
from flowrl.nodes._backend.normalizing import Normalizing
from flowrl.nodes._backend.returns import whitened


class MultiReward(Normalizing):
    """Compare each session's rewards with those of its group one by one, and add the results up."""

    scope = "batch"

    coefficients: list[float] | None = Field(None, min_length=1)
    """Factor of each reward's advantage, in the order of `reads: {rewards: [...]}`; all 1 when left out."""
    whiten: bool = False
    """Give the sums mean 0 and variance 1 over the sessions of the batch."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        return refusal(self.coefficients, reads.get("rewards", ()))

    def run(self, rewards: list[Sample[float]], response_mask: Token[bool]) -> Out:
        factors = np.asarray(self.coefficients or [1.0] * len(rewards))
        each = Scores.all_of(rewards)
        advantage = factors @ np.stack([self.normalized(scores, scores.above_mean) for scores in each])
        signal = np.any([scores.signal for scores in each], axis=0)
        if self.whiten:
            advantage[signal] = whitened(advantage[signal])
        total = replace(each[0], score=factors @ np.stack([scores.score for scores in each]))
        return self.Out(*of_sessions(total, advantage, response_mask))
