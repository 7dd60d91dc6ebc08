"""Group-relative advantages.

Source: Shao et al., "DeepSeekMath", arXiv:2402.03300, equation 3 with outcome supervision; without the division by the
standard deviation it is Dr. GRPO, Liu et al., arXiv:2503.20783. We depart from both where a group tells nothing: equal
rewards, or a single scored session, give exactly 0; and unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from flowrl.batch import Sample, Token
from flowrl.nodes._backend.comparing import Scores, of_sessions
from flowrl.nodes._backend.normalizing import Normalizing


class Grpo(Normalizing):
    """Compare each session's reward with those of its group, and give every token of the session the result."""

    scope = "group"

    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its whole group, or of the others in it (as `advantage.rloo`)."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        scores = Scores.of(reward)
        advantage = scores.above_mean if self.baseline == "mean" else scores.above_others
        return self.Out(*of_sessions(scores, self.normalized(scores, advantage), response_mask))
