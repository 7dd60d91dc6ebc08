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
from flowrl.nodes._backend.sessions import extremes


class GrpoPassk(Normalizing):
    """Give the best session of each group its lead over the second best, and all others 0."""

    scope = "group"

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        scores = Scores.of(reward)
        group, num_groups = scores.group, reward.rows.num_groups
        highest = extremes(scores.score, group, num_groups)[1][group]
        below = scores.score < highest
        second = extremes(np.where(below, scores.score, -np.inf), group, num_groups)[1][group]
        # Where two are the best the second best is as good, and where one is alone there is none.
        best = ~below & (np.bincount(group, ~below, num_groups)[group] == 1) & (second > -np.inf)
        advantage = np.where(best, scores.score, 0.0) - np.where(best, second, 0.0)
        return self.Out(*of_sessions(scores, self.normalized(scores, advantage), response_mask))
