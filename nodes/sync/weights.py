"""The trained weights on their way to everything that generates with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, PrivateAttr

from flowrl.node import Context, Node
from flowrl.nodes._backend.engine import engines_of

if TYPE_CHECKING:
    from flowrl.nodes._backend.transport import Receiver
    from flowrl.nodes._backend.weights import Bucket


class Weights(Node):
    """Send the model's weights from its training pool to the engines of every pool that generates with it."""

    weights = "syncs"
    pure = False
    device = "accelerator"

    transport: Literal["auto", "shm", "ipc", "nccl"] = "auto"
    """How they travel: `shm` through host memory, `ipc` inside a GPU that training and engine share, `nccl` from GPU to
    GPU; `auto` is the fastest that pools and engines allow."""
    bucket_mib: int = Field(256, ge=1)
    """Weights that are under way at a time, in MiB; a larger tensor travels alone."""
    verify: bool = False
    """Compare a checksum of every tensor with what the engine holds after the sync."""

    _context: Context = PrivateAttr()

    def refuses_placement(self, trains_on: str, generates_on: Sequence[str], accelerators: bool | None = None) -> str:
        shared = [pool for pool in generates_on if pool == trains_on]
        others = [pool for pool in generates_on if pool != trains_on]
        if self.transport == "nccl" and shared:
            return (
                f"transport nccl connects one GPU with another, but training and an engine share the workers of pool "
                f"'{trains_on}': a GPU cannot be two ranks"
            )
        if self.transport == "ipc" and others:
            return (
                f"transport ipc works inside one GPU, but the weights are trained on pool '{trains_on}' and an engine "
                f"is on pool '{others[0]}'"
            )
        if self.transport in ("ipc", "nccl") and accelerators is False:
            return f"transport {self.transport} needs GPUs, and there is none"
        return ""

    def setup(self, context: Context) -> None:
        self._context = context

    def receiver(self) -> Receiver:
        """Where this worker is, and what its engines want."""
        from flowrl.nodes._backend.transport import Receiver, this_process

        return Receiver(this_process(), tuple(engine.wants() for engine in engines_of(self._context).values()))

    def send(self, receivers: Sequence[Receiver]) -> Iterator[Bucket]:
        """The training weights bucket by bucket, from rank 0; the other ranks help to gather them.

        On a CPU a bucket may share the model's memory: let all be received before the next update.
        """
        from flowrl.nodes._backend.trainer import trainer_of
        from flowrl.nodes._backend.transport import stream

        trainer = trainer_of(self._context)
        trainer.cycle_start.show(False)
        return stream(
            self._context, trainer.module, receivers, self.transport, self.bucket_mib << 20, trainer.dtype, self.verify
        )

    def receive(self, part: Bucket, version: int) -> None:
        """Hand a bucket to this worker's engines; after the last one they generate with the weights as this version."""
        for engine in engines_of(self._context).values():
            if part.begins is not None:
                engine.begin_update(part.begins)
            engine.load_bucket(part)
            if part.ends:
                engine.finish_update(version)
                if engine.version() != version:
                    raise RuntimeError(f"after the sync an engine has version {engine.version()}, not {version}")
