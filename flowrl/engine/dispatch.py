"""Who works on what: tasks become calls of free workers, and whatever these send back arrives in one queue."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.engine.call import Call, Receipt
from flowrl.engine.clock import now
from flowrl.engine.cluster import Cluster
from flowrl.engine.occupancy import Occupancy
from flowrl.engine.samples import Sampler
from flowrl.engine.store import Store
from flowrl.engine.sync import WeightSync
from flowrl.errors import RunError
from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.rows import Rows
from flowrl.schedule.base import Progress, Task

MAX_QUEUED = 2
"""Calls of a worker that run or wait: the next one starts without the driver in between."""
ABORT_SECONDS = 10.0
"""Longest wait for the end of a rollout that was told to end."""


@dataclass(frozen=True)
class Late:
    """A rollout has not ended within its timeout, and was told to end."""

    node: BoundNode
    worker: str
    uids: tuple[str, ...]
    progress: Progress


@dataclass(frozen=True)
class Arrival:
    """Something that a worker has sent: a block of a call, or the end of a weight sync."""

    node: str
    receipt: Receipt
    refs: Sequence[Any]
    progress: Progress
    """Whose groups it is about."""


class Dispatcher:
    """Starts tasks on the workers of a plan; `serves` as the schedule has it."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        workers: Mapping[str, Sequence[str]],
        store: Store,
        sampler: Sampler,
        serves: bool,
    ) -> None:
        """`workers` are their names by pool."""
        self.plan, self.cluster, self.workers, self.store, self.sampler = plan, cluster, workers, store, sampler
        self.serves, self.paused = serves, False
        self._paused_before = self._pause_began = 0.0
        self.weight_sync = WeightSync(plan, cluster, workers)
        self.versions = dict.fromkeys(plan.document.models, 0)
        self.changed: set[str] = set()
        """Models whose weights an update has changed, and no sync has sent yet."""
        self.load, self.occupancy = Counter[str](), Occupancy(workers)
        self.serving = Counter[str]()
        """By worker, groups that it generates."""
        self.arrivals: asyncio.Queue[Arrival | Late | BaseException] = asyncio.Queue()
        self.running: set[asyncio.Task[None]] = set()
        self.failed_attempts: dict[tuple[str, str], int] = {}
        """By node and group, how often it was tried in vain."""

    def submit(self, task: Task, progress: Progress) -> int:
        """Start a task on free workers of its pool; how many there were: without any it stays ready."""
        node = self.plan.graph.nodes[task.node]
        workers = self.place(node)
        if not workers:
            return 0
        progress.submit(node.name, task.uids)
        if node.weights == "syncs":
            self.load.update(workers)
            self.start(self.sync(node, task, workers, progress), node, workers, task.uids, progress)
            return 1
        parts = self.store.find(node.fields_read, task.uids)
        if node.weights == "updates" and not any(len(part.rows) for part in parts):
            raise RunError(f"{progress.title}: no trajectory is left to train on", node=node.name, rows=task.uids)
        calls = [(worker, uids) for worker, uids in self.shares(node, workers, task.uids) if uids]
        for worker, uids in calls:
            attempt = 1 + max(self.failed_attempts.get((node.name, uid), 0) for uid in uids)
            samples = self.sampler.asked_of(node, uids)
            serves = self.serves and node.weights == "generates"
            call = Call(
                node.name, task.step, uids, attempt, self.block_groups(node), samples, progress.asked, serves=serves
            )
            # Nothing queues behind a stream: what it would start on depends on the clock.
            load = 0 if serves else MAX_QUEUED if call.block_groups is not None else 1
            self.serving[worker] += len(uids) if serves else 0
            work = self.run(worker, call, [part.ref for part in parts], load, progress)
            self.load[worker] += load
            self.start(work, node, [worker], uids, progress)
        return len(calls)

    def place(self, node: BoundNode) -> list[str]:
        """The workers that a task goes to, none if they are busy.

        All ranks for a node with a model, all free ones for rows that are scored alone, always the first one for a node
        that is not pure, else any one. A node that computes on all ranks may queue behind another such node; all ranks
        see the same order.
        """
        pools = [self.plan.pool_of(node)]
        if node.weights == "syncs":
            pools = sorted({*pools, *self.plan.engine_pools(node.model)})
        names = [worker for pool in pools for worker in self.workers[pool]]
        if node.weights == "generates":
            names = [*self.copies(node)]
            if self.serves:
                return [] if self.paused else names
        if node.weights is None:
            names = names if node.cls.pure else names[:1]  # what it remembers lies on one worker
            free = [name for name in names if not self.load[name]]
            return free if node.scores_rows else free[:1]
        # A call with a timeout must not spend it waiting.
        limit = MAX_QUEUED if node.weights in ("reads", "updates") and node.spec.timeout is None else 1
        return names if all(self.load[name] < limit for name in names) else []

    def shares(
        self, node: BoundNode, workers: Sequence[str], uids: tuple[str, ...]
    ) -> Iterable[tuple[str, tuple[str, ...]]]:
        """What each worker works on: every rank sees all groups of a model's batch, others get a part."""
        if node.weights in ("reads", "updates"):
            return ((worker, uids) for worker in workers)
        load = Counter({worker: self.serving[worker] * self.serves for worker in workers})
        given: dict[str, list[str]] = {worker: [] for worker in workers}
        for uid in uids:
            least = min(workers, key=load.__getitem__)
            given[least].append(uid)
            load[least] += 1
        return ((worker, tuple(part)) for worker, part in given.items())

    def block_groups(self, node: BoundNode) -> int | None:
        """A stream of finished groups, for nodes that make trajectories; None is one block at the end."""
        return self.plan.groups_per_block if node.cls.cardinality == "expands" else None

    def start(
        self,
        work: Coroutine[Any, Any, None],
        node: BoundNode,
        workers: Sequence[str],
        uids: tuple[str, ...],
        progress: Progress,
    ) -> None:
        """Let work run beside the loop; its error becomes an arrival.

        What generates and need not succeed is told to end after its timeout: its groups settle with what they have.
        """
        limit = None if node.scores_rows else node.spec.timeout  # rows that are scored alone have it each
        spared = node.weights == "generates" and node.on_error in ("drop", "retry")

        async def guarded() -> None:
            call = asyncio.ensure_future(work)
            try:
                ended = await self.ends_within(call, limit)
                running = frozenset() if ended else progress.running(node.name)  # before any is given up
                if not ended and spared:
                    self.arrivals.put_nowait(Late(node, workers[0], uids, progress))
                    await self.cluster.abort(workers[0], node.name, uids)
                    ended = await self.ends_within(call, ABORT_SECONDS)
                if not ended:
                    names, late = ", ".join(dict.fromkeys(workers)), [uid for uid in uids if uid in running]
                    raise RunError(f"no end within its timeout of {limit:g} s", node=node.name, worker=names, rows=late)
                await call
            finally:
                call.cancel()

        self.beside(guarded())

    async def ends_within(self, call: asyncio.Future[None], seconds: float | None) -> bool:
        """Whether a call ends in time; while engines are paused no time passes."""
        start, before = now(), self.paused_seconds
        left = seconds
        while left is None or left > 0:
            done, _ = await asyncio.wait([call], timeout=left)
            if done:
                return True
            assert seconds is not None, "without a limit it has ended"
            left = seconds - (now() - start) + self.paused_seconds - before
        return False

    def beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Let work run beside the loop; its error becomes an arrival."""

        async def guarded() -> None:
            try:
                await work
            except (Exception, KeyboardInterrupt) as error:  # with --local a second Ctrl-C strikes in here
                self.arrivals.put_nowait(error)

        task = asyncio.ensure_future(guarded())
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    def abort(self, uids: Sequence[str]) -> None:
        """Groups are given up: generate them no further."""
        for node in self.plan.graph.nodes.values():
            for worker in self.copies(node) if node.weights == "generates" else ():
                self.beside(self.cluster.abort(worker, node.name, uids))

    def copies(self, node: BoundNode) -> Sequence[str]:
        """Of a node that generates, the first worker of each copy of its model, which speaks for the others."""
        return self.workers[self.plan.pool_of(node)][:: node.workers_per_copy]

    async def run(self, worker: str, call: Call, refs: Sequence[Any], load: int, progress: Progress) -> None:
        """One call of a node on one worker; its blocks arrive one by one."""
        num_outputs = len(self.plan.outputs[call.node]) + bool(call.samples)
        with self.occupancy.running(call.node, [worker]) as ended:
            async for receipt, returned in self.cluster.call(worker, call, refs, num_outputs):
                self.occupancy.add(worker, receipt.start, receipt.end)
                if receipt.last:
                    ended()
                    self.load[worker] -= load
                if call.serves:
                    self.serving[worker] -= len(receipt.settled)
                elif self.serves and receipt.last and not self.paused and worker in self.rollout_workers:
                    await self.cluster.resume(worker)  # a model has computed where an engine was
                self.arrivals.put_nowait(Arrival(call.node, receipt, returned, progress))

    async def sync(self, node: BoundNode, task: Task, workers: Sequence[str], progress: Progress) -> None:
        """Send the trained weights, if they have changed, to every engine of the model, as the next version."""
        assert node.model is not None, "checked before"
        start, sender = now(), self.weight_sync.senders(node)[0]
        if node.model in self.changed:
            version = self.versions[node.model] + 1
            await self.weight_sync.push(node, version)
            self.versions[node.model] = version
            self.changed.remove(node.model)
        self.load.subtract(workers)
        for worker in workers:
            self.occupancy.add(worker, start, now())
        receipt = Receipt(node.name, task.step, 1, sender, Rows(()), task.uids, start, now(), 0, 0)
        self.arrivals.put_nowait(Arrival(node.name, receipt, (), progress))

    async def pause(self) -> None:
        """Let all engines sleep between two tokens, with their requests kept."""
        self.paused, self._pause_began = True, now()
        await asyncio.gather(*map(self.cluster.pause, self.rollout_workers))

    async def resume(self) -> None:
        """Let their requests go on."""
        await asyncio.gather(*map(self.cluster.resume, self.rollout_workers))
        self._paused_before, self.paused = self.paused_seconds, False

    @property
    def paused_seconds(self) -> float:
        """How long engines have been paused in this run."""
        return self._paused_before + (now() - self._pause_began) * self.paused

    @property
    def rollout_workers(self) -> list[str]:
        """All workers that generate."""
        nodes = self.plan.graph.nodes.values()
        pools = dict.fromkeys(self.plan.pool_of(node) for node in nodes if node.weights == "generates")
        return [worker for pool in pools for worker in self.workers[pool]]
