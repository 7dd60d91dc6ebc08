"""REINFORCE with a leave-one-out baseline.

Source: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv:2402.14740:

    A_i = r_i - (sum of the other rewards of the group) / (n - 1)

We depart from it where a group tells nothing: a single scored session has no others and gives exactly 0, as equal
rewards do; and unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import NamedTuple

from flowrl.batch import Sample, Token
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, of_sessions


class Rloo(Node):
    """Compare each session's reward with the mean of the others of its group."""

    scope = "group"
    compares_samples = True

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        scores = Scores.of(reward)
        return self.Out(*of_sessions(scores, scores.above_others, response_mask))
