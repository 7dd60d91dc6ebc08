"""The policy update: optimizer steps on a policy loss, a divergence from a reference, and an entropy.

The losses and their papers are in `_backend/policy_losses.py`, what their sum is in `_backend/objective.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from pydantic import Field

from flowrl.batch import PromptToken, Step, Token
from flowrl.node import Node
from flowrl.nodes._backend.objective import Objective

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.nodes._backend.chunked import Entropy
    from flowrl.nodes._backend.minibatch import TokenRows
    from flowrl.rows import Rows


class Policy(Objective):
    """Take one optimizer step for each mini-batch of prompts, on the tokens of the loss mask."""

    corrections: ClassVar[Mapping[str, str]] = {"importance_weights": "{use: filter.rollout_correction}"}

    uncorrected_staleness: int = Field(2, ge=0)
    """Versions that samples may be old without `importance_weights`, as `filter.rollout_correction` writes them."""

    def max_staleness(self) -> float:
        return self.uncorrected_staleness

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        num_steps = self.epochs * -(-num_prompts // self.minibatch)
        unused = "old_log_probs" not in self._loss.parameters
        if unused or "old_log_probs" in reads or (num_steps == 1 and not max_staleness):
            return ""
        steps = f"{num_steps} optimizer steps in one cycle"
        samples = f"samples up to {max_staleness} version{'s' * (max_staleness != 1)} old"
        return (
            f"{steps if num_steps > 1 else samples} need old_log_probs, the policy at the start of the step: add "
            "{use: model.logprob, writes: {log_probs: old_log_probs}}, or "
            + ("take one step (minibatch, epochs, updates_per_sync)" if num_steps > 1 else "max_staleness: 0")
        )

    def refuses_writers(self, writers: Mapping[str, Node]) -> str:
        anchor = writers.get("old_log_probs")
        if anchor is None or anchor.weights != "generates" or "importance_weights" not in writers:
            return ""
        return "old_log_probs are the engine's own, which needs no correction: importance_weights would do it twice"

    def run(
        self,
        prompt_ids: PromptToken[int],
        response_ids: Token[int],
        loss_mask: Token[bool],
        advantages: Token[float],
        temperature: Step[float],
        old_log_probs: Token[float] | None = None,
        ref_log_probs: Token[float] | None = None,
        rollout_log_probs: Token[float] | None = None,
        max_tokens: Step[int] | None = None,
        importance_weights: Token[float] | None = None,
        corrected_mask: Token[bool] | None = None,
        policy_version: Token[int] | None = None,
    ) -> None:
        from flowrl.nodes._backend.minibatch import TokenRows
        from flowrl.nodes._backend.mismatch import report_versions

        rows = prompt_ids.rows
        mask = loss_mask if corrected_mask is None else loss_mask & corrected_mask
        if policy_version is not None and self._context.rank == 0:
            report_versions(policy_version.jagged, mask.values)
        columns = {"advantages": advantages, "old_log_probs": old_log_probs, "ref_log_probs": ref_log_probs}
        columns |= {"rollout_log_probs": rollout_log_probs, "importance_weights": importance_weights}
        floats = {name: column.cast("float").jagged for name, column in columns.items() if column is not None}
        if refusal := self.refuses(dict.fromkeys(floats, ()), rows.num_groups):
            raise ValueError(refusal)
        masked = {"loss_mask": mask.cast("bool").jagged, **floats}
        batch = TokenRows(prompt_ids.jagged, response_ids.jagged, masked, np.arange(len(rows)))
        budget = 0 if max_tokens is None else max_tokens.value
        self.train(batch, rows, "actor", lambda part: self._update(part, rows, temperature.value, budget))

    def _update(self, batch: TokenRows, rows: Rows, temperature: float, max_tokens: int) -> None:
        from flowrl.nodes._backend.losses import denominator

        divisor = denominator(batch.tensor("loss_mask"), batch.row, self._aggregation, max_tokens)
        terms = ("loss", "pg_loss", "kl_loss")[: 3 if self.kl_coef > 0 else 2]
        self.step(batch, rows, "actor", terms, partial(self._share, divisor, temperature))

    def _share(self, divisor: float, temperature: float, model: Any, part: TokenRows, excluded: bool) -> Tensor:
        """A micro-batch's part of the mini-batch's loss."""
        from flowrl.nodes._backend.losses import within
        from flowrl.nodes._backend.mismatch import report_mismatch

        scores = self._scores(model, part, temperature)
        device = scores["log_probs"].device
        mask = part.tensor("loss_mask", device) & (not excluded)
        columns = {name: within(mask, column) for name, column in scores.items()}
        columns["old_log_probs"] = columns["log_probs"].detach()
        read = part.columns.keys() - {"loss_mask"}
        columns |= {name: within(mask, part.tensor(name, device)) for name in read}
        loss = self._objective(columns | {"mask": mask, "row": part.row.to(device)}, divisor)
        if "rollout_log_probs" in read:
            report_mismatch(columns["old_log_probs"] - columns["rollout_log_probs"], float(mask.sum()))
        return loss

    def _scores(self, model: Any, part: TokenRows, temperature: float) -> dict[str, Tensor]:
        """What the model says of each token: `log_probs` and `entropy`, both (T,)."""
        from flowrl.nodes._backend.logprob import token_log_probs

        wanted: Entropy = "gradient" if self.entropy_coef else "value"
        log_probs, entropy = token_log_probs(model, part.prompts, part.responses, temperature, wanted)
        assert entropy is not None
        return {"log_probs": log_probs, "entropy": entropy}
