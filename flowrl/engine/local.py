"""`--local`: every worker lives in the driver, and nodes run one at a time in its thread, so that breakpoints work.

What it cannot do: overlap nodes, use several workers in a pool, or kill a row that never returns.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from flowrl.batch import Batch
from flowrl.engine.call import Call, Receipt, WorkerSetup
from flowrl.engine.setup import THREAD_SETTINGS
from flowrl.engine.worker import Worker
from flowrl.errors import RunError
from flowrl.metrics import failure_of


class LocalCluster:
    """Workers in this process; a reference is the object itself."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self._awake: dict[str, asyncio.Event] = {}
        self._num_sending, self._nothing_sent = 0, asyncio.Event()
        self._nothing_sent.set()

    def start(self, workers: Sequence[WorkerSetup]) -> None:
        """Make the workers one after the other."""
        for name, value in THREAD_SETTINGS.items():
            os.environ.setdefault(name, value)
        for setup in workers:
            self.workers[setup.name] = Worker(setup)
            self._awake[setup.name] = asyncio.Event()
            self._awake[setup.name].set()
            with _named(setup.name, "a node could not be set up: "):
                self.workers[setup.name].load()

    def put(self, batch: Batch) -> Batch:
        """The batch itself."""
        return batch

    async def call(
        self, worker: str, call: Call, refs: Sequence[Any], num_outputs: int
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        """Run the node here and now.

        One that serves lets others run after each block, and waits there for the end of a pause or of a weight sync.
        """
        if call.serves:
            await self._may_serve(worker)
        for receipt, outputs in self.workers[worker].blocks(call, refs):
            yield receipt, list(outputs)
            if call.serves:
                await self._may_serve(worker)

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        """The objects themselves."""
        return list(refs)

    async def _may_serve(self, worker: str) -> None:
        await asyncio.sleep(0)
        while not (self._awake[worker].is_set() and self._nothing_sent.is_set()):
            await self._awake[worker].wait()
            await self._nothing_sent.wait()

    async def pause(self, worker: str) -> None:
        """Let its engines sleep, and what it serves wait."""
        self._awake[worker].clear()
        with _named(worker):
            self.workers[worker].pause()

    async def resume(self, worker: str) -> None:
        """Let its engines wake."""
        with _named(worker):
            self.workers[worker].resume()
        self._awake[worker].set()

    async def abort(self, worker: str, node: str, uids: Sequence[str]) -> None:
        """End groups that it generates."""
        with _named(worker):
            self.workers[worker].abort(node, uids)

    async def receiver(self, worker: str, node: str) -> Any:
        """What it says."""
        return self.workers[worker].receiver(node)

    async def send(self, worker: str, node: str, receivers: Sequence[Any]) -> AsyncIterator[Any]:
        """The parts themselves."""
        self._num_sending += 1
        self._nothing_sent.clear()
        try:
            for part in self.workers[worker].send(node, receivers):
                yield part
        finally:
            self._num_sending -= 1
            if not self._num_sending:
                self._nothing_sent.set()

    async def receive(self, worker: str, node: str, part: Any, version: int) -> None:
        """Load it."""
        self.workers[worker].receive(node, part, version)

    async def save(self, worker: str, folder: str) -> int:
        """Copy its states."""
        with _named(worker):
            return self.workers[worker].states.copy(folder)

    async def written(self, worker: str) -> Mapping[str, int]:
        """Wait for the thread that writes them."""
        return await asyncio.to_thread(self.workers[worker].states.written)

    async def restore(self, worker: str, folder: str) -> None:
        """Load them."""
        with _named(worker):
            self.workers[worker].restore(folder)

    def close(self) -> None:
        """Nothing was started."""
        for worker in self.workers.values():
            worker.close()


@contextmanager
def _named(worker: str, what: str = "") -> Iterator[None]:
    """What a node raises outside a call becomes a `RunError` of the worker."""
    try:
        yield
    except Exception as error:
        details = failure_of((), error).traceback
        raise RunError(f"{what or f'{type(error).__name__}: '}{error}", worker=worker, details=details) from error
