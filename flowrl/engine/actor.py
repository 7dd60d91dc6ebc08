"""A worker as an actor on Ray."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray

from flowrl.batch import Batch
from flowrl.engine.call import Call, WorkerSetup
from flowrl.engine.setup import LOOPBACK
from flowrl.engine.worker import Worker

_ray: Any = ray
"""Ray without its type hints, which cover only a part of what it takes."""


def _items(items: Iterable[Any]) -> Iterator[Any]:
    """Not `yield from`: Ray sends into the generator, which what holds the items need not take."""
    for item in items:  # noqa: UP028
        yield item


class RayWorker:
    """The actor: a `Worker` whose calls return their outputs as objects of their own."""

    def __init__(self, setup: WorkerSetup, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self.worker = Worker(setup)

    def address(self, loopback: bool) -> tuple[str, int]:
        """Host and free port for the process group of the pool."""
        host = LOOPBACK if loopback else _ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def devices(self) -> str:
        """Names of the accelerators that this worker was given; empty where there are none."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def load(self, environment: Mapping[str, str]) -> None:
        """Make the nodes and load their models."""
        os.environ.update(environment)
        self.worker.load()

    def call(self, call: Call, num_outputs: int, *parts: Batch) -> Any:
        """One receipt, then the outputs: as many objects as the driver expects."""
        ((receipt, outputs),) = self.worker.blocks(call, parts)
        objects = (receipt, *outputs, *[None] * (num_outputs - len(outputs)))
        return objects if num_outputs else receipt

    def stream(self, call: Call, num_outputs: int, *parts: Batch) -> Iterator[Any]:
        """For each block its outputs, then its receipt."""
        for receipt, outputs in self.worker.blocks(call, parts):
            yield from _items([*outputs, *[None] * (num_outputs - len(outputs)), receipt])

    def send(self, node: str, receivers: Sequence[Any]) -> Iterator[Any]:
        """Weights of a sync node, part by part."""
        yield from _items(self.worker.send(node, receivers))

    @ray.method(concurrency_group="serve")
    def serve(self, call: Call, num_outputs: int, *parts: Batch) -> Iterator[Any]:
        """`stream`, beside other calls."""
        yield from self.stream(call, num_outputs, *parts)

    @ray.method(concurrency_group="control")
    def pause(self) -> None:
        """Stop the engines, requests kept."""
        self.worker.pause()

    @ray.method(concurrency_group="control")
    def resume(self) -> None:
        """Let the engines go on."""
        self.worker.resume()

    @ray.method(concurrency_group="control")
    def abort(self, node: str, uids: Sequence[str]) -> None:
        """End groups that are being generated."""
        self.worker.abort(node, uids)

    @ray.method(concurrency_group="receive")
    def receiver(self, node: str) -> Any:
        """What senders of weights must know."""
        return self.worker.receiver(node)

    @ray.method(concurrency_group="receive")
    def receive(self, node: str, part: Any, version: int) -> None:
        """Load a part of the weights into the engine."""
        self.worker.receive(node, part, version)

    def save(self, folder: str) -> int:
        """Copy the states of the nodes, and begin to write them."""
        return self.worker.states.copy(folder)

    @ray.method(concurrency_group="saving")
    def written(self) -> dict[str, int]:
        """Wait until they are on disk."""
        return self.worker.states.written()

    def restore(self, folder: str) -> None:
        """Go on from a checkpoint."""
        self.worker.restore(folder)

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """End child processes."""
        self.worker.close()


NUM_SERVED = 64
"""Calls that generate side by side; further ones wait for the end of one."""
RayActor = _ray.remote(concurrency_groups={"control": 4, "receive": 1, "saving": 1, "serve": NUM_SERVED})(RayWorker)
"""Calls run one at a time, beside those of the groups `control` and `serve`.

Weights are received, one part at a time, beside the call that sends them: it may be of the same worker.
"""
