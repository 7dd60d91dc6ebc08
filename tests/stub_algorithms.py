"""Nodes of three methods that the library does not have, with the ports that they would have: to check, not to run.

PPO with a critic (Schulman et al., arXiv:1707.06347), a reward by a judge model, and on-policy distillation.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from flowrl.batch import Prompt, Sample, Token
from flowrl.node import Node


class Gae(Node):
    """Generalized advantage estimates (arXiv:1506.02438) of a reward at the last token, less a divergence per token."""

    discount: float = Field(1.0, gt=0, le=1)
    trace: float = Field(0.95, ge=0, le=1)
    kl_coef: float = Field(0.0, ge=0)

    class Out(NamedTuple):
        advantages: Token[float]
        returns: Token[float]
        loss_mask: Token[bool]

    def needs(self) -> dict[str, bool]:
        return dict.fromkeys(("old_log_probs", "ref_log_probs"), self.kl_coef > 0)

    def run(
        self,
        reward: Sample[float],
        values: Token[float],
        response_mask: Token[bool],
        old_log_probs: Token[float] | None = None,
        ref_log_probs: Token[float] | None = None,
    ) -> Out:
        raise NotImplementedError


class Judge(Node):
    """A score from a model that reads prompt, expected answer and response."""

    weights = "reads"
    device = "accelerator"

    rubric: str = "Is the answer right?"

    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, prompt: Prompt[str], answer: Prompt[str], response: Sample[str]) -> Out:
        raise NotImplementedError


class ReverseKl(Node):
    """Each token's advantage is how much more likely the teacher finds it than the student did."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, response_mask: Token[bool], old_log_probs: Token[float], teacher_log_probs: Token[float]) -> Out:
        raise NotImplementedError
