"""What all updates of a model have in common: a trainer, its state for checkpoints, and its model for others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import PrivateAttr

from flowrl.metrics import metric
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.model_node import ModelNode

if TYPE_CHECKING:
    from flowrl.nodes._backend.trainer import Update


class Updating(ModelNode):
    """Base of the nodes that take optimizer steps."""

    scope = "batch"
    weights = "updates"
    pure = False

    _trainer: Any = PrivateAttr()
    _changed: bool = PrivateAttr(False)

    def setup(self, context: Context) -> None:
        from flowrl.nodes._backend.trainer import trainer_of

        self._context, self._trainer = context, trainer_of(context)

    def begin(self) -> None:
        """Have the newest weights to update; those of the cycle's start are kept for the readers of its next batch."""
        self._changed = False
        self._trainer.cycle_start.show(False)
        if self._context.updates_per_sync > 1 and self._context.cycle is not None:
            self._trainer.cycle_start.keep(self._context.cycle)

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
