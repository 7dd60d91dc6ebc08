"""REINFORCE++ with a baseline: the distance from the group's mean, whitened over the batch.

Source: Hu et al., "REINFORCE++", arXiv:2501.03262, the variant with a baseline:

    d_i = r_i - (mean of the group),    A = (d - mean of d) / std of d    over all tokens of the loss mask

The group's mean takes care of prompts that are easier than others; the deviation of the whole batch is steadier than
that of a group. We depart from it where a group tells nothing: equal rewards, or a single scored session, give exactly
0 and are left out of the batch's mean and deviation, as unscored sessions are.
"""

from __future__ import annotations

from typing import NamedTuple

from flowrl.batch import Sample, Token
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, of_sessions
from flowrl.nodes._backend.returns import whitened


class ReinforcePlusPlusBaseline(Node):
    """Compare each session's reward with the mean of its group, then whiten over the tokens of the batch."""

    scope = "batch"
    compares_samples = True

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        scores = Scores.of(reward)
        advantage, signal = scores.above_mean, scores.signal
        advantage[signal] = whitened(advantage[signal], scores.num_tokens(response_mask)[signal])
        return self.Out(*of_sessions(scores, advantage, response_mask))
