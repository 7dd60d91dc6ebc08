"""Advantages over the baseline with the least variance for on-policy updates.

Source: Hao et al., "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585, with the lengths l of the responses:

    A_i = r_i - (sum of l_j r_j) / (sum of l_j)    over the sessions j of the group

A session's length is what the model wrote in all its outputs. We depart from it where a group tells nothing: equal
rewards, or a single scored session, give exactly 0; and unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowrl.batch import Sample, Token
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, of_sessions


class Opo(Node):
    """Compare each session's reward with its group's mean, in which long responses count for more."""

    scope = "group"
    compares_samples = True

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        scores = Scores.of(reward)
        length, num_groups = scores.num_tokens(response_mask), reward.rows.num_groups
        total = np.bincount(scores.group, length, num_groups)
        weighted = np.bincount(scores.group, length * scores.above_mean, num_groups)
        # The weighted mean, from the plain one: where that distance is exactly 0, so is this one.
        advantage = scores.above_mean - (weighted / np.maximum(total, 1))[scores.group]
        return self.Out(*of_sessions(scores, advantage, response_mask))
