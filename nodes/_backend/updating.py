"""What all updates of a model have in common: mini-batches, a trainer, its state for checkpoints, and its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PrivateAttr

from flowrl.metrics import collect, metric, replay
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.model_node import ModelNode

if TYPE_CHECKING:
    from torch import Tensor

    from flowrl.nodes._backend.minibatch import TokenRows
    from flowrl.nodes._backend.trainer import Update
    from flowrl.partition import MicroBatch
    from flowrl.rows import Rows


class Updating(ModelNode):
    """Base of the nodes that take optimizer steps."""

    scope = "batch"
    weights = "updates"
    pure = False

    minibatch: int = Field(ge=1)
    """Prompts of one optimizer step."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch."""
    shuffle: bool = False
    """Cut each epoch's mini-batches in another order of the prompts, drawn from the run's seed and their uids."""
    after_step: int = Field(0, ge=0)
    """Train from the step after this one on: in the first steps the model stays as it is, while a critic learns."""
    max_tokens_per_microbatch: int = Field(8192, ge=1)
    """Tokens computed at a time, padding included; a shared prompt counts once. Bounds memory and changes no value."""
    max_skipped: int = Field(5, ge=1)
    """The run ends after so many optimizer steps in a row whose loss or gradient was not finite; they are skipped."""

    _trainer: Any = PrivateAttr()
    _changed: bool = PrivateAttr(False)

    def setup(self, context: Context) -> None:
        from flowrl.nodes._backend.trainer import trainer_of

        self._context, self._trainer = context, trainer_of(context)

    def train(self, batch: TokenRows, rows: Rows, prefix: str, update: Callable[[TokenRows], None]) -> None:
        """Have each mini-batch of each epoch updated, unless the run is at a step in which the model stays as it is.

        `update` is given the rows with a trainable token: others cost time and add nothing.
        """
        from flowrl.nodes._backend.minibatch import mini_batches
        from flowrl.nodes._backend.utilization import utilization

        self.begin()
        cycle = self._context.cycle
        if cycle is not None and cycle <= self.after_step:
            metric(f"{prefix}/waiting", 1.0, reduce="max")
            return
        for epoch in range(self.epochs):
            shuffle_seed = f"{self._context.seed}/{epoch}" if self.shuffle else None
            for part in map(batch.take, mini_batches(rows, self.minibatch, shuffle_seed)):
                with utilization(self._context, self._trainer.module, part.prompts, part.responses):
                    if len(trained := part.with_any("loss_mask")):
                        update(trained)
                    else:
                        metric(f"{prefix}/empty_minibatches", float(self._context.rank == 0), reduce="sum")

    def begin(self) -> None:
        """Have the newest weights to update; those of the cycle's start are kept for the readers of its next batch."""
        self._changed = False
        self._trainer.cycle_start.show(False)
        if self._context.updates_per_sync > 1 and self._context.cycle is not None:
            self._trainer.cycle_start.keep(self._context.cycle)

    def step(
        self,
        batch: TokenRows,
        rows: Rows,
        prefix: str,
        terms: Sequence[str],
        share: Callable[[Any, TokenRows, bool], Tensor],
    ) -> None:
        """One optimizer step; every rank holds the whole mini-batch and works on its own rows of it.

        `share` gives the part that some rows have in the loss, or a 0 that hangs on the graph where they are to be
        excluded. Its metrics named in `terms` have no weight: shares of one mini-batch add up to one value.
        """
        from flowrl.nodes._backend.memory import memory_watched

        plan = batch.plan(self._trainer.module, self._context, self.max_tokens_per_microbatch)

        def part(model: Any, micro: MicroBatch) -> Tensor:
            begin(batch.positions[micro.rows], micro.num_tokens)
            return share(model, batch.take(micro.rows), micro.excluded)

        with memory_watched(self._context, rows, self.max_tokens_per_microbatch) as begin, collect() as report:
            update = self._trainer.step(plan, part)
        if not update.skipped:  # else its loss may be NaN, and so would be the mean over all steps
            replay(report)
            for name in terms:
                metric(f"{prefix}/{name}", 0.0, float(self._context.rank == 0))
        self.report_step(update, prefix, self.max_skipped)

    def report_step(self, update: Update, prefix: str, max_skipped: int) -> None:
        """Metrics of an optimizer step, counted by one rank. Raises after so many in a row that were skipped."""
        lead = float(self._context.rank == 0)
        if not update.skipped:
            metric(f"{prefix}/grad_norm", lead * update.grad_norm, lead)
            metric(f"{prefix}/grad_clipped", lead * update.clipped, lead)
            metric(f"{prefix}/lr", update.learning_rate, reduce="last")
            self._changed = True
        metric(f"{prefix}/skipped_steps", lead * update.skipped, reduce="sum")
        if self._trainer.num_skipped >= max_skipped:
            steps = f"{max_skipped} optimizer step" + "s in a row" * (max_skipped > 1)
            raise FloatingPointError(f"the loss or its gradient was not finite in {steps} (max_skipped)")

    def changed(self) -> bool:
        return self._changed

    def state(self) -> dict[str, Any]:
        return dict(self._trainer.state())

    def load_state(self, state: dict[str, Any]) -> None:
        self._trainer.load_state(state)

    def export(self, state: dict[str, Any], model: ModelSpec, folder: str, adapter: bool) -> None:
        from flowrl.nodes._backend.export import export_model

        export_model(state["weights"], model, Path(folder), adapter)
