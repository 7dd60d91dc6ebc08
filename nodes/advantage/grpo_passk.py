"""Advantages for the best of a group: the gradient of pass@k, where k is the size of the group.

Source: Tang et al., "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
arXiv:2503.19595: the objective is the best reward of a group, the baseline of a session the best of the others. So only
the best session has an advantage, its distance from the second best; here over the group's standard deviation, as in
GRPO, unless `normalize: none`. Two that are best give 0, as a single scored session does, which has no others. Unscored
sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Sample, Token
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, of_sessions


class GrpoPassk(Node):
    """Give the best session of each group its lead over the second best, and all others 0."""

    scope = "group"
    compares_samples = True

    normalize: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation, or do not."""
    epsilon: float = Field(1.0e-6, ge=0)
    """Added to the standard deviation."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        scores = Scores.of(reward)
        order = np.lexsort((scores.score, scores.group))
        group, ranked = scores.group[order], scores.score[order]
        is_best = np.append(group[1:] != group[:-1], np.ones(min(1, len(group)), np.bool_))
        has_second = np.append(np.zeros(min(1, len(group)), np.bool_), group[1:] == group[:-1])
        (best,) = np.nonzero(is_best & has_second)
        advantage = np.zeros(len(order))
        advantage[order[best]] = ranked[best] - ranked[best - 1]
        if self.normalize == "std":
            advantage = scores.divided_by_std(advantage, self.epsilon)
        return self.Out(*of_sessions(scores, advantage, response_mask))
