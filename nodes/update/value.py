"""The update of a critic: values are moved towards the returns of PPO (arXiv:1707.06347) by a clipped squared error."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from flowrl.batch import PromptToken, Token
from flowrl.metrics import metric
from flowrl.nodes._backend.updating import Updating

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.nodes._backend.minibatch import TokenRows
    from flowrl.rows import Rows

TERMS = ("loss",)
"""Metrics of which each micro-batch has a share."""


class Value(Updating):
    """Take one optimizer step of a critic for each mini-batch of prompts, on the tokens of the loss mask."""

    head = "value"

    clip: float = Field(0.2, gt=0, allow_inf_nan=True)
    """How far a value may move from `values` with a gain; `.inf` switches clipping off."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How the losses of tokens become one number."""

    def run(
        self,
        prompt_ids: PromptToken[int],
        response_ids: Token[int],
        loss_mask: Token[bool],
        values: Token[float],
        returns: Token[float],
        corrected_mask: Token[bool] | None = None,
    ) -> None:
        from flowrl.nodes._backend.minibatch import TokenRows

        rows = prompt_ids.rows
        mask = loss_mask if corrected_mask is None else loss_mask & corrected_mask
        columns = {"values": values, "returns": returns}
        floats = {name: column.cast("float").jagged for name, column in columns.items()}
        masked = {"loss_mask": mask.cast("bool").jagged, **floats}
        batch = TokenRows(prompt_ids.jagged, response_ids.jagged, masked, np.arange(len(rows)))
        if self._context.rank == 0:
            _report_fit(values.values[mask.values], returns.values[mask.values])
        self.train(batch, rows, "critic", lambda part: self._update(part, rows))

    def _update(self, batch: TokenRows, rows: Rows) -> None:
        from flowrl.nodes._backend.losses import denominator

        divisor = denominator(batch.tensor("loss_mask"), batch.row, self.aggregation, 0)
        self.step(batch, rows, "critic", TERMS, partial(self._share, divisor))

    def _share(self, divisor: float, model: Any, part: TokenRows, excluded: bool) -> Tensor:
        """A micro-batch's part of the mini-batch's loss."""
        from flowrl.nodes._backend.losses import aggregate, value_loss, within
        from flowrl.nodes._backend.values import token_values

        values = token_values(model, part.prompts, part.responses)
        device = values.device
        mask = part.tensor("loss_mask", device) & (not excluded)
        old, returns = (within(mask, part.tensor(name, device)) for name in ("values", "returns"))
        values = within(mask, values)
        losses = value_loss(values, old, returns, self.clip)
        loss = aggregate(losses, part.row.to(device), mask, self.aggregation, divisor)
        num_tokens = float(mask.sum())
        clipped = losses.detach() > (values.detach() - returns).square() / 2
        metric("critic/loss", loss.item(), 0.0)
        metric("critic/value", values.detach().sum().item(), num_tokens)
        metric("critic/clip_fraction", float(clipped.sum()), num_tokens)
        return loss


def _report_fit(values: np.ndarray[Any, Any], returns: np.ndarray[Any, Any]) -> None:
    """How well the values (T,) before the update tell the returns (T,): 1 exactly, 0 no better than their mean."""
    if len(returns) == 0:
        return
    values, returns = values.astype(np.float64), returns.astype(np.float64)
    metric("critic/return", returns.sum(), len(returns))
    if returns.max() > returns.min():
        metric("critic/explained_variance", 1.0 - np.var(returns - values) / np.var(returns))
