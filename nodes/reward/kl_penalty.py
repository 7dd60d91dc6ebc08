"""The divergence from a reference as a part of the reward, in the place of a term of the loss.

With the estimate KL_t of each token that the policy wrote (Schulman, "Approximating KL Divergence", 2020), as in
Ziegler et al., "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593, equations 2 and 3:

    shaped reward of a session      reward - coef * sum of its KL_t
    reward of a token               -coef * KL_t, and the reward besides at the last token that is trained

A session is rewarded as by `advantage.*`: by its last output, and each of its outputs ends in that reward.

The adaptive coefficient follows their section 2.2: after each batch of n responses with a mean divergence KL it is
multiplied by 1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon. We depart where it could be negative or 0: it is not.
Log-ratios are clamped to ±20 before any exponential, and k3 to 10, as in the loss.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from flowrl.batch import Sample, Token
from flowrl.metrics import metric
from flowrl.model import SettingError
from flowrl.node import Context, Node
from flowrl.nodes._backend.divergence import estimate, log_ratio
from flowrl.nodes._backend.sessions import sessions
from flowrl.rows import Array

MOST_AT_ONCE = 0.2
"""Largest relative error of the divergence that the coefficient answers to."""


class KlPenalty(Node):
    """Subtract the divergence from the reference from the reward, per response and per token (KL in the reward)."""

    scope = "batch"
    pure = False

    coef: float = Field(0.05, gt=0)
    """Weight of the divergence; the first one, where it adapts."""
    kl: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the divergence."""
    target: float | None = Field(None, gt=0)
    """Divergence of a response, in nats, that the coefficient is steered to; null keeps the coefficient fixed."""
    horizon: int = Field(10_000, ge=1)
    """Responses over which it may change by a fifth of itself."""

    class Out(NamedTuple):
        shaped_reward: Sample[float]
        token_rewards: Token[float]

    _coef: float = PrivateAttr(0.0)

    @model_validator(mode="after")
    def _only_what_adapts_has_a_horizon(self) -> Self:
        if self.target is None and self.horizon != type(self).model_fields["horizon"].default:
            fact = "horizon has no effect without target: the coefficient is fixed"
            raise SettingError(("horizon", "target"), fact, "target: 6.0, or leave horizon out")
        return self

    def setup(self, context: Context) -> None:
        self._coef = self.coef

    def run(
        self,
        reward: Sample[float],
        response_mask: Token[bool],
        old_log_probs: Token[float],
        ref_log_probs: Token[float],
    ) -> Out:
        rows, offsets, mask = response_mask.rows, response_mask.offsets, response_mask.values
        row = response_mask.jagged.row
        kl = estimate(log_ratio(mask, old_log_probs=old_log_probs, ref_log_probs=ref_log_probs), self.kl)
        of_response = np.bincount(row, kl, len(rows))
        session_of, last_output = sessions(rows)
        rewards = reward.values[last_output].astype(np.float64)[session_of]
        shaped = rewards - self._coef * np.bincount(session_of, of_response)[session_of]
        of_token = -self._coef * kl
        last = np.full(len(rows), -1)
        np.maximum.at(last, row[mask], np.flatnonzero(mask))
        scored = (last >= 0) & np.isfinite(rewards)
        of_token[last[scored]] += rewards[scored]
        self._report(kl, mask, of_response)
        return self.Out(Sample(rows, shaped), Token(rows, of_token.astype(np.float32), offsets))

    def _report(self, kl: Array, mask: Array, of_response: Array) -> None:
        metric("reward/kl", kl.sum(), mask.sum())
        metric("reward/kl_coef", self._coef, reduce="last")
        if self.target is not None and len(of_response):
            error = np.clip(of_response.mean() / self.target - 1.0, -MOST_AT_ONCE, MOST_AT_ONCE)
            self._coef *= max(1.0 + float(error) * len(of_response) / self.horizon, 0.5)

    def state(self) -> dict[str, Any]:
        return {"coef": self._coef}

    def load_state(self, state: dict[str, Any]) -> None:
        if self.target is not None:
            self._coef = float(state["coef"])
