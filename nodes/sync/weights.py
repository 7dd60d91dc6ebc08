"""The trained weights on their way to everything that generates with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PrivateAttr

from flowrl.node import Context, Node
from flowrl.nodes._backend.engine import engines_of

if TYPE_CHECKING:
    from flowrl.nodes._backend import weights as _weights


class Weights(Node):
    """Send the model's weights from its training pool to the engines of every pool that generates with it."""

    weights = "syncs"
    pure = False
    device = "accelerator"

    verify: bool = False
    """Compare a checksum of the weights on both sides."""

    _context: Context = PrivateAttr()

    def setup(self, context: Context) -> None:
        self._context = context

    def send(self) -> _weights.Weights | None:
        """The training weights from rank 0; on a CPU they share its memory: send them before the next update."""
        if self._context.rank > 0:
            return None
        from flowrl.nodes._backend.trainer import trainer_of
        from flowrl.nodes._backend.weights import pack

        trainer = trainer_of(self._context)
        return pack(trainer.module, trainer.dtype, self.verify)

    def receive(self, weights: _weights.Weights, version: int) -> None:
        """Hand the weights to this worker's engines, which generate with them from now on as this version."""
        for engine in engines_of(self._context).values():
            engine.update_weights(weights, version)
            assert engine.version() == version, "an engine knows which weights it generates with"
