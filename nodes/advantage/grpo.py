"""Group-relative advantages.

Source: Shao et al., "DeepSeekMath", arXiv:2402.03300, equation 3 with outcome supervision; without the division by the
standard deviation it is Dr. GRPO, Liu et al., arXiv:2503.20783. We depart from both where a group tells nothing: equal
rewards, or a single scored session, give exactly 0; and unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from flowrl.batch import Sample, Token
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, of_sessions


class Grpo(Node):
    """Compare each session's reward with those of its group, and give every token of the session the result."""

    scope = "group"
    compares_samples = True

    normalize: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation, or do not (Dr. GRPO)."""
    baseline: Literal["mean", "leave_one_out"] = "mean"
    """What a reward is compared with: the mean of its whole group, or of the others in it (as `advantage.rloo`)."""
    epsilon: float = Field(1.0e-6, ge=0)
    """Added to the standard deviation."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        scores = Scores.of(reward)
        advantage = scores.above_mean if self.baseline == "mean" else scores.above_others
        if self.normalize == "std":
            advantage = scores.divided_by_std(advantage, self.epsilon)
        return self.Out(*of_sessions(scores, advantage, response_mask))
