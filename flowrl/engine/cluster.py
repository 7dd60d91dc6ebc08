"""What the loop asks of whoever runs the workers: Ray (`pools.py`), or the driver's own thread (`local.py`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from flowrl.batch import Batch
from flowrl.engine.call import Call, Receipt, WorkerSetup


class Cluster(Protocol):
    """Workers that run calls and keep columns."""

    def start(self, workers: Sequence[WorkerSetup]) -> None:
        """Start these workers and let them load their models."""

    def put(self, batch: Batch) -> Any:
        """A reference to columns that the driver makes itself, such as the prompts of a step."""

    def call(
        self, worker: str, call: Call, refs: Sequence[Any], num_outputs: int
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        """Run a node on a worker: for each block its receipt and the references to its outputs."""

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        """The objects themselves; called in a thread, for small ones."""

    async def pause(self, worker: str) -> None:
        """Let the engines of this worker stop between two tokens, with their requests kept, and what trains wake."""

    async def resume(self, worker: str) -> None:
        """Let what trains sleep and the engines wake: kept requests go on, under the weights of the last sync."""

    async def abort(self, worker: str, node: str, uids: Sequence[str]) -> None:
        """Let a node that generates end these groups now: their unfinished sessions are absent, and no failures."""

    async def receiver(self, worker: str, node: str) -> Any:
        """What a sync node of this worker says to those that send weights to it."""

    def send(self, worker: str, node: str, receivers: Sequence[Any]) -> AsyncIterator[Any]:
        """References to the weights that a sync node of this worker sends, part by part.

        The next part is made when one is taken, so that no more than two are there at a time.
        """

    async def receive(self, worker: str, node: str, part: Any, version: int) -> None:
        """Let a sync node of this worker load a part."""

    async def save(self, worker: str, folder: str) -> int:
        """Let a worker copy the states of its nodes and begin to write them into a folder; their bytes.

        All workers of a pool are asked at once.
        """

    async def written(self, worker: str) -> Mapping[str, int]:
        """Wait until they are on disk; the size of each file by its name in the folder."""

    async def restore(self, worker: str, folder: str) -> None:
        """Let a worker go on from a checkpoint. All workers of a pool are asked at once."""

    def close(self) -> None:
        """End every worker and every process that was started."""
