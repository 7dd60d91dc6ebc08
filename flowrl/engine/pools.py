"""Pools on Ray: a placement group for each pool, one actor for each of its workers.

Columns are *returned* by actors and lie in Ray's object store; the driver awaits receipts only.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from flowrl.batch import Batch
from flowrl.engine.actor import RayActor
from flowrl.engine.call import Call, Receipt, WorkerSetup
from flowrl.engine.setup import LOOPBACK, THREAD_SETTINGS
from flowrl.engine.sweeper import start_sweeper
from flowrl.errors import RunError
from flowrl.graph.pools import Pool

PLACEMENT_SECONDS = 60.0
CONNECT_SECONDS = 5.0
LATE_SECONDS = 60.0
FETCH_SECONDS = 30.0
POOL_DEVICES = "FLOWRL_POOL_DEVICES"
"""Environment variable with the accelerators of all workers of the pool, in their order."""
_ray: Any = ray
"""Ray without its type hints, which cover only a part of what it takes."""


class RayCluster:
    """Actors on placement groups, in a cluster that is joined or started here."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        modules: Iterable[str],
        num_cpus: int,
        address: str | None,
        stage: Callable[[str], None],
    ) -> None:
        """`modules` are those that define the nodes; packages of the user's are sent along to a cluster."""
        self.pools, self.address, self.num_cpus, self.stage = pools, address, num_cpus, stage
        self.modules = tuple(modules)
        self.actors: dict[str, Any] = {}
        self.groups: dict[str, PlacementGroup] = {}
        self.sweeper: subprocess.Popen[bytes] | None = None

    def connect(self) -> dict[str, float]:
        """Join or start Ray; the resources that it has."""
        logging.getLogger("ray").setLevel(logging.ERROR)
        self.stage("starting Ray" if self.address is None else f"joining Ray at {self.address}")
        quiet: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.address is None:
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self.sweeper = start_sweeper()
            # "local" starts a cluster of its own even where another one is running on this machine
            ray.init(address="local", num_cpus=self.num_cpus, _node_ip_address=LOOPBACK, **quiet)
        else:
            _require_listener(self.address)
            try:
                ray.init(address=self.address, runtime_env={"py_modules": own_packages(self.modules)}, **quiet)
            except ConnectionError as error:
                raise RunError(f"{error}; for a cluster on this machine, give --address auto") from None
        return {str(name): float(amount) for name, amount in _ray.cluster_resources().items()}

    def start(self, workers: Sequence[WorkerSetup]) -> None:
        """Place the pools, start their actors, and let them load."""
        self._place()
        for setup in workers:
            pool = self.pools[setup.pool]
            options = {
                "num_cpus": pool.cpus_per_worker,
                "num_gpus": int(setup.device != "cpu"),
                "resources": dict(pool.resources),
            }
            if setup.pool in self.groups:
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    self.groups[setup.pool], placement_group_bundle_index=setup.rank
                )
            threads = {"OMP_NUM_THREADS": str(setup.num_threads), **THREAD_SETTINGS}
            self.actors[setup.name] = RayActor.options(**options).remote(setup, threads)
        self.stage("loading models")
        environments = self._rendezvous(workers)
        loading = {self.actors[w.name].load.remote(environments[w.name]): w.name for w in workers}
        while loading:
            done, _ = ray.wait(list(loading), timeout=LATE_SECONDS)
            if not done:
                self.stage(f"loading models: still waiting for {', '.join(sorted(loading.values()))}")
                continue
            name = loading.pop(done[0])
            try:
                ray.get(done[0])
            except ray.exceptions.RayTaskError as error:
                raise RunError(f"a node could not be set up: {error.cause or error}", worker=name,
                               details=_plain(error)) from None  # fmt: skip
            except ray.exceptions.RayError as error:
                raise RunError(f"{_lost(error)}, while loading", worker=name, details=_plain(error)) from None

    def _place(self) -> None:
        for name, pool in self.pools.items():
            bundle = {kind: amount for kind, amount in pool.needs(_num_gpus() > 0).items() if amount}
            if bundle:  # a pool that asks for nothing, such as `cpu`, fits anywhere
                self.groups[name] = placement_group([bundle] * pool.workers, strategy="PACK")
        deadline = time.monotonic() + PLACEMENT_SECONDS
        for name, group in self.groups.items():
            if not group.wait(max(deadline - time.monotonic(), 0.1)):
                asked = f"{self.pools[name].workers} x {group.bundle_specs[0]}"
                raise RunError(f"pool {name} could not be placed within {PLACEMENT_SECONDS:g} s: asked for {asked}, "
                               f"free now {_ray.available_resources()}")  # fmt: skip

    def _rendezvous(self, workers: Sequence[WorkerSetup]) -> dict[str, dict[str, str]]:
        """Environment of each worker for the process group of its pool."""
        environments: dict[str, dict[str, str]] = {worker.name: {} for worker in workers}
        for first in (worker for worker in workers if worker.num_ranks > 1 and worker.rank == 0):
            host, port = ray.get(self.actors[first.name].address.remote(self.address is None))
            members = [worker for worker in workers if worker.pool == first.pool]
            devices = ray.get([self.actors[worker.name].devices.remote() for worker in members])
            for worker in members:
                environments[worker.name] = {
                    "RANK": str(worker.rank), "WORLD_SIZE": str(worker.num_ranks), "LOCAL_RANK": "0",
                    POOL_DEVICES: ",".join(devices), "MASTER_ADDR": host, "MASTER_PORT": str(port),
                } | ({"GLOO_SOCKET_IFNAME": "lo"} if self.address is None else {})  # fmt: skip
        return environments

    def put(self, batch: Batch) -> Any:
        """Into the object store."""
        return ray.put(batch)

    async def call(
        self, worker: str, call: Call, refs: Sequence[Any], num_outputs: int
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        """Run a node: one fixed set of returned objects, or a stream of them when the call asks for blocks."""
        actor = self.actors[worker]
        if call.block_groups is None:
            returned = actor.call.options(num_returns=1 + num_outputs).remote(call, num_outputs, *refs)
            receipt, outputs = (returned[0], returned[1:]) if num_outputs else (returned, [])
            yield await _receipt(receipt, call, worker), list(outputs)
            return
        outputs, stream = [], actor.serve if call.serves else actor.stream
        async for ref in stream.options(num_returns="streaming").remote(call, num_outputs, *refs):
            if len(outputs) < num_outputs:
                outputs.append(ref)
            else:
                yield await _receipt(ref, call, worker), outputs
                outputs = []
        for ref in outputs:  # a stream that breaks off ends with its error in place of an output
            await _done(ref, call.node, worker)

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        """Small objects, from wherever they lie."""
        found: list[Any] = ray.get(list(refs), timeout=FETCH_SECONDS)
        return found

    async def pause(self, worker: str) -> None:
        """Let its engines sleep."""
        await _done(self.actors[worker].pause.remote(), "", worker)

    async def resume(self, worker: str) -> None:
        """Let its engines wake."""
        await _done(self.actors[worker].resume.remote(), "", worker)

    async def abort(self, worker: str, node: str, uids: Sequence[str]) -> None:
        """End groups that it generates."""
        await _done(self.actors[worker].abort.remote(node, uids), node, worker)

    async def receiver(self, worker: str, node: str) -> Any:
        """What a sync node says."""
        return await _done(self.actors[worker].receiver.remote(node), node, worker)

    async def send(self, worker: str, node: str, receivers: Sequence[Any]) -> AsyncIterator[Any]:
        """References to parts of the weights; they never come to the driver."""
        # The worker goes on when the one part that may wait has been taken.
        stream = self.actors[worker].send.options(num_returns="streaming", _generator_backpressure_num_objects=1)
        async for part in stream.remote(node, receivers):
            yield part  # a stream that breaks off ends with its error, which whoever receives it will raise

    async def receive(self, worker: str, node: str, part: Any, version: int) -> None:
        """Let an engine load one."""
        await _done(self.actors[worker].receive.remote(node, part, version), node, worker)

    async def save(self, worker: str, folder: str) -> int:
        """Copy its states."""
        return int(await _done(self.actors[worker].save.remote(folder), "", worker))

    async def written(self, worker: str) -> Mapping[str, int]:
        """Wait for the thread that writes them."""
        sizes: dict[str, int] = await _done(self.actors[worker].written.remote(), "", worker)
        return sizes

    async def restore(self, worker: str, folder: str) -> None:
        """Load them."""
        await _done(self.actors[worker].restore.remote(folder), "", worker)

    def close(self) -> None:
        """End the actors and, if it was started here, Ray itself."""
        if ray.is_initialized():
            closing = [actor.close.remote() for actor in self.actors.values()]
            ray.wait(closing, num_returns=len(closing), timeout=1.0) if closing else None
            for actor in self.actors.values():
                ray.kill(actor)
            for group in self.groups.values():
                remove_placement_group(group)
            ray.shutdown()
        if self.sweeper is not None:
            self.sweeper.communicate()


def own_packages(modules: Iterable[str]) -> list[str]:
    """Folders of the packages that these modules belong to and that were not installed: other machines lack them."""
    found = []
    for name in sorted({module.partition(".")[0] for module in modules} - {"flowrl"}):
        spec = importlib.util.find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        found += [folder for folder in folders if "site-packages" not in Path(folder).parts]
    return found


def _require_listener(address: str) -> None:
    """Raise `RunError` at once where nobody listens: Ray itself tries for minutes."""
    if address == "auto":
        # The cluster that was started last on this machine leaves its address here, and stays there if it dies.
        address = os.environ.get("RAY_ADDRESS") or ray._private.utils.read_ray_address() or ""
        if not address:
            return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise RunError(f"'{address}' is no address of a Ray cluster; give host:port of its head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise RunError(
            f"no Ray cluster answers at '{address}' ({error}); give host:port of its head, or auto"
        ) from None


def _num_gpus() -> int:
    return int(_ray.cluster_resources().get("GPU", 0))


def _plain(error: BaseException) -> str:
    """Ray's account of an error without terminal colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


async def _receipt(ref: Any, call: Call, worker: str) -> Receipt:
    receipt: Receipt = await _done(ref, call.node, worker)
    return receipt


async def _done(ref: Any, node: str, worker: str) -> Any:
    """The value of a future; what Ray raises becomes a `RunError` that names node and worker."""
    try:
        return await ref
    except ray.exceptions.RayTaskError as error:
        raise RunError(
            f"{type(error.cause).__name__}: {error.cause}", node=node, worker=worker, details=_plain(error)
        ) from None
    except ray.exceptions.RayError as error:
        raise RunError(_lost(error), node=node, worker=worker, details=_plain(error)) from None


def _lost(error: BaseException) -> str:
    """What has become of a worker, or of what it has sent."""
    if isinstance(error, ray.exceptions.RayActorError):
        return "the worker died"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "Ray ended the worker because the machine was out of memory"
    return f"Ray gave up: {type(error).__name__}"
