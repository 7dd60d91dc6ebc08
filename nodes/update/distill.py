"""On-policy distillation: the policy learns from a teacher's whole distribution at each token that it drew itself.

L = policy loss + distill_coef * KL(student || teacher) + the other terms of `update.policy`; without advantages there
is no policy loss. With the teacher q and the student p, KL = sum over words of p (log p - log q), at the states through
which the student's own responses pass. Sources: GKD, arXiv:2306.13649, equation 4 with lambda 1 and the reverse
divergence; MiniLLM, arXiv:2306.08543, equation 1. We depart from MiniLLM, and not from GKD, in that no gradient flows
through the choice of the states: the divergence of each token is minimised where it stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr

from flowrl.batch import PromptToken, Step, Token
from flowrl.metrics import metric
from flowrl.node import Context
from flowrl.nodes.update.policy import Policy

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.nodes._backend.chunked import Entropy
    from flowrl.nodes._backend.minibatch import TokenRows

OF_THE_POLICY_LOSS = ("loss", "loss_options", "clip_low", "clip_high", "dual_clip", "tau_positive", "tau_negative")
"""Settings that nothing but the policy loss reads."""


class Distill(Policy):
    """Take one optimizer step for each mini-batch of prompts towards a teacher, along advantages if there are any."""

    teacher: str = Field("teacher", min_length=1)
    """Name under `models:` of the frozen model to come closer to; it lies on the same workers."""
    distill_coef: float = Field(1.0, gt=0)
    """Weight of the divergence from the teacher; the policy loss has weight 1."""
    top_k: int | None = Field(None, ge=1)
    """Count the words alone that the student finds likeliest, and all others as one; null counts each word."""
    teacher_temperature: float | None = Field(None, gt=0)
    """Temperature of the teacher: the lower, the surer it is of its likeliest words; null is that of the rollout."""

    _teacher: Any = PrivateAttr()

    def also_reads(self) -> dict[str, str]:
        return {"teacher": self.teacher}

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        if "advantages" in reads:
            return super().refuses(reads, num_prompts, max_staleness)
        fields = type(self).model_fields
        unread = [key for key in OF_THE_POLICY_LOSS if key in fields and getattr(self, key) != fields[key].default]
        if unread:
            fact = f"{unread[0]} is of the policy loss, which there is none of without advantages"
            return f"{fact}: add an advantage.* node"
        if "importance_weights" in reads:
            fact = "importance_weights weigh the policy loss, which there is none of without advantages"
            return f"{fact}: leave them out; how old samples may be is uncorrected_staleness"
        return ""

    def setup(self, context: Context) -> None:
        from flowrl.nodes._backend.distilling import Teacher

        super().setup(context)
        self._teacher = Teacher(replace(context, model=self.teacher))

    def sleep(self) -> None:
        super().sleep()
        self._teacher.place(awake=False)

    def wake(self) -> None:
        super().wake()
        self._teacher.place(awake=True)

    def run(  # type: ignore[override]  # here advantages are optional
        self,
        prompt_ids: PromptToken[int],
        response_ids: Token[int],
        loss_mask: Token[bool],
        temperature: Step[float],
        advantages: Token[float] | None = None,
        old_log_probs: Token[float] | None = None,
        ref_log_probs: Token[float] | None = None,
        rollout_log_probs: Token[float] | None = None,
        max_tokens: Step[int] | None = None,
        importance_weights: Token[float] | None = None,
        corrected_mask: Token[bool] | None = None,
        policy_version: Token[int] | None = None,
    ) -> None:
        given: Any = advantages  # what is None is left out of the columns
        super().run(
            prompt_ids, response_ids, loss_mask, given, temperature, old_log_probs, ref_log_probs,
            rollout_log_probs, max_tokens, importance_weights, corrected_mask, policy_version,
        )  # fmt: skip
        self._teacher.rest()

    def _scores(self, model: Any, part: TokenRows, temperature: float) -> dict[str, Tensor]:
        from flowrl.nodes._backend.distilling import token_divergences

        wanted: Entropy = "gradient" if self.entropy_coef else "value"
        found = token_divergences(
            model,
            self._teacher,
            part.prompts,
            part.responses,
            temperature,
            wanted,
            self.top_k,
            self.teacher_temperature,
        )
        return dict(zip(("log_probs", "entropy", "divergence"), found, strict=True))

    def _objective(self, columns: Mapping[str, Tensor], divisor: float) -> Tensor:
        from flowrl.nodes._backend.losses import aggregate

        divergence, mask = columns["divergence"], columns["mask"]
        loss = self.distill_coef * aggregate(divergence, columns["row"], mask, self._aggregation, divisor)
        metric("actor/loss", loss.item(), 0.0)  # beside what the other terms add to it
        metric("distill/reverse_kl", divergence.detach().sum().item(), float(mask.sum()))
        without = {"advantages": divergence.detach().new_zeros(len(divergence))}
        return loss + super()._objective({**without, **columns}, divisor)
