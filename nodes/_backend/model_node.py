"""What nodes that compute with the weights of a model have in common."""

from __future__ import annotations

from pydantic import PrivateAttr

from flowrl.node import Context, Node


class ModelNode(Node):
    """A node that calls a model equally often on every rank of its pool, and may find it in host memory."""

    device = "accelerator"
    takes_shards = True

    _context: Context = PrivateAttr()

    def sleep(self) -> None:
        """Let the model leave the device's memory to engines, if it is to do so."""
        from flowrl.nodes._backend.trainer import place

        place(self._context, awake=False)

    def wake(self) -> None:
        """Let the model take its memory again."""
        from flowrl.nodes._backend.trainer import place

        place(self._context, awake=True)
