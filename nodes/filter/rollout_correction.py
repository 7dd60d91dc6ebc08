"""Correction for responses that another policy has written than the one that the update starts from.

The engine wrote token t with probability mu(t): under older weights, or under the same ones with other rounding. The
update's anchor is pi_old(t), the policy at the start of its cycle. With d(t) = log pi_old(t) - log mu(t) over the
tokens that the model wrote (`response_mask`), the ratio of the two is

    token      exp(d(t))                  of each token alone
    sequence   exp(sum of d over a row)   of the whole trajectory, the same for all its tokens
    geometric  exp(mean of d over a row)  of the trajectory per token, for masking only

where what is raised is clamped to plus and minus 20 first. Weights are the ratio cut off at `max_weight`;
`update.policy` multiplies the loss of a token with its weight, after the clip (decoupled objective: Hilton et al.,
arXiv:2110.00641; truncation: Ionides, "Truncated Importance Sampling", 2008). Masking leaves out what has a ratio
outside of the bounds: a token, or all tokens of a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from flowrl.batch import Token
from flowrl.metrics import metric
from flowrl.model import SettingError
from flowrl.node import Node
from flowrl.nodes._backend.divergence import log_ratio
from flowrl.nodes._backend.terms import MAX_LOG_RATIO
from flowrl.rows import Array

Level = Literal["token", "sequence", "geometric"]


class RolloutCorrection(Node):
    """Weigh, or leave out, what the policy in training would have written more or less often than the engine did."""

    scope = "batch"

    weighting: Literal["token", "sequence", "none"] = "token"
    """Weigh each token by its own ratio, or by that of its trajectory, the product over its tokens."""
    max_weight: float = Field(2.0, ge=1)
    """Weights are cut off at this: a little bias for bounded variance."""
    masking: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out single tokens, or trajectories by the product or the geometric mean of their tokens' ratios."""
    min_ratio: float = Field(0.5, ge=0, le=1)
    """Lowest ratio that is not masked."""
    max_ratio: float = Field(2.0, ge=1)
    """Highest ratio that is not masked."""
    newest_only: bool = False
    """Leave out the tokens of a response that older weights have written than its newest one."""

    class Out(NamedTuple):
        importance_weights: Token[float]
        corrected_mask: Token[bool]

    @model_validator(mode="after")
    def _something_is_corrected_and_every_setting_counts(self) -> Self:
        if self.weighting == "none" and self.masking == "none" and not self.newest_only:
            raise SettingError(("weighting", "masking"), "this corrects nothing: nothing is weighed or masked",
                               "weighting: token")  # fmt: skip
        of = {"max_weight": "weighting", "min_ratio": "masking", "max_ratio": "masking"}
        for key, switch in of.items():
            if getattr(self, switch) == "none" and getattr(self, key) != type(self).model_fields[key].default:
                fact = f"{key} has no effect with {switch}: none"
                raise SettingError((key, switch), fact, f"{switch}: token, or leave {key} out")
        return self

    def needs(self) -> dict[str, bool]:
        return {"policy_version": self.newest_only}

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        if reads["old_log_probs"] != reads["rollout_log_probs"]:
            return ""
        return (
            f"old_log_probs and rollout_log_probs are both read from '{reads['old_log_probs'][0]}', so nothing is "
            "corrected: add {use: model.logprob, writes: {log_probs: old_log_probs}}"
        )

    def run(
        self,
        old_log_probs: Token[float],
        rollout_log_probs: Token[float],
        response_mask: Token[bool],
        policy_version: Token[int] | None = None,
    ) -> Out:
        mask, row = response_mask.values, response_mask.jagged.row
        difference = log_ratio(mask, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
        ratio, kept = np.ones(len(mask)), mask.copy()
        if self.weighting != "none":
            ratio = ratios(difference, row, mask, self.weighting)
        weights = np.where(mask, np.minimum(ratio, self.max_weight), 1.0)
        if self.masking != "none":
            bounded = ratios(difference, row, mask, self.masking)
            kept &= (bounded >= self.min_ratio) & (bounded <= self.max_ratio)
        if policy_version is not None and self.newest_only:
            kept &= policy_version.values == highest(policy_version.values, row, mask)[row]
        self._report(weights, weights < ratio, row, mask, kept)
        rows, offsets = response_mask.rows, response_mask.offsets
        return self.Out(Token(rows, weights.astype(np.float32), offsets), Token(rows, kept, offsets))

    def _report(self, weights: Array, truncated: Array, row: Array, mask: Array, kept: Array) -> None:
        num_tokens, num_kept = int(mask.sum()), int(kept.sum())
        if not num_tokens:
            return
        rows, rows_kept = np.unique(row[mask]), np.unique(row[kept])
        used = np.where(kept, weights, 0.0)
        # A trajectory whose tokens share a weight is one sample.
        used = highest(used, row, mask)[rows] if self.weighting == "sequence" else used[mask]
        metric("correction/ess", effective_share(used))
        metric("correction/truncated", (truncated & mask).sum(), num_tokens)
        metric("correction/masked", num_tokens - num_kept, num_tokens)
        metric("correction/masked_rows", len(rows) - len(rows_kept), reduce="sum")
        if num_kept:
            metric("correction/weight/mean", weights[kept].sum(), num_kept)
            metric("correction/weight/max", weights[kept].max(), reduce="max")


def ratios(difference: Array, row: Array, mask: Array, level: Level) -> Array:
    """How much likelier the trainer makes each token (T,), alone or with its row.

    `difference` (T,) are log ratios, 0 outside of the mask; `row` (T,) names the row of each token.
    """
    if level != "token":
        total = np.bincount(row, difference)
        mean = total / np.maximum(np.bincount(row, mask), 1)
        difference = (mean if level == "geometric" else total)[row]
    found: Array = np.exp(difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    return found


def highest(values: Array, row: Array, mask: Array) -> Array:
    """The highest value of each row up to the last, over the tokens of the mask; -1 where it has none of these."""
    found = np.full(row.max(initial=-1) + 1, -1, dtype=values.dtype)
    np.maximum.at(found, row[mask], values[mask])
    return found


def effective_share(weights: Array) -> float:
    """Effective sample size of weighted samples as a share of their number: (sum of w)^2 / (sum of w^2) / n.

    1 where all weigh the same, 0 where nothing weighs anything. Source: Kish, "Survey Sampling", 1965.
    """
    squares = float(np.square(weights).sum())
    return float(weights.sum()) ** 2 / squares / len(weights) if squares else 0.0
