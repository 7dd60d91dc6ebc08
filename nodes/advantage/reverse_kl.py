"""On-policy distillation: a token's advantage is how much likelier the teacher finds it than the student did.

Source: Agarwal et al., "On-Policy Distillation of Language Models", arXiv:2306.13649, with the reverse divergence: on
the student's own responses log pi_teacher(t) - log pi_student(t) estimates minus the divergence of its next token, and

    A[t] = coef * clip(log pi_teacher[t] - log pi_student[t], ±clip) + reward_coef * reward_advantage[t]

is its policy gradient. Each token answers for itself, not for what follows (a discount of 0). There is no reward to
miss and no group to compare: all tokens that the model wrote are trained, and nothing is whitened.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Token
from flowrl.metrics import metric
from flowrl.node import Node
from flowrl.nodes._backend.comparing import report_advantages


class ReverseKl(Node):
    """Reward each token for what the teacher thinks of it, more than the student did."""

    coef: float = Field(1.0, gt=0)
    """Weight of the teacher's opinion."""
    clip: float = Field(20.0, gt=0)
    """Log ratios of teacher and student count up to plus and minus this."""
    reward_coef: float = Field(0.0, ge=0)
    """Weight of `reward_advantages`, as another node of `advantage.*` writes them; at 0 they are not read."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def needs(self) -> dict[str, bool]:
        return {"reward_advantages": self.reward_coef > 0}

    def run(
        self,
        old_log_probs: Token[float],
        teacher_log_probs: Token[float],
        response_mask: Token[bool],
        reward_advantages: Token[float] | None = None,
    ) -> Out:
        mask = response_mask.values
        ratio = teacher_log_probs.values[mask].astype(np.float64) - old_log_probs.values[mask]
        advantage = self.coef * ratio.clip(-self.clip, self.clip)
        if reward_advantages is not None and self.reward_coef:
            advantage += self.reward_coef * reward_advantages.values[mask]
        metric("distill/reverse_kl", -ratio.sum(), len(ratio))
        metric("distill/clipped", (np.abs(ratio) > self.clip).sum(), len(ratio))
        report_advantages(advantage)
        spread = np.zeros(len(mask))
        spread[mask] = advantage
        return self.Out(Token(response_mask.rows, spread, response_mask.offsets), response_mask)
