"""Advantages for the best of a group: the gradient of pass@k, where k is the size of the group.

Source: Tang et al., "Optimizing Language Models for Inference Time Objectives using Reinforcement Learning",
arXiv:2503.19595: the objective is the best reward of a group, the baseline of a session the best of the others. So

    A_i = r_i - (the second best reward)    for the best session, 0 for all others

here over the group's standard deviation, as in GRPO, unless `normalize: none`. Two that are best give 0; so does a
single scored session, which has no others. Unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowrl.batch import Sample, Token
from flowrl.nodes._backend.comparing import Scores, of_sessions
from flowrl.nodes._backend.normalizing import Normalizing


class GrpoPassk(Normalizing):
    """Give the best session of each group its lead over the second best, and all others 0."""

    scope = "group"

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
        return self.Out(*of_sessions(scores, self.normalized(scores, advantage), response_mask))
