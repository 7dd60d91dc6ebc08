"""The main loop: `Loop.train`. Everything else in this module serves it.

One step is one walk through the graph. A node is submitted as soon as its inputs and a worker are there; whatever
settles next is collected, recorded, and may make others ready. Columns stay in the object store; the driver holds
references and identities.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.data.stream import Prompt, PromptStream
from flowrl.engine.call import Call, Receipt, WorkerSetup
from flowrl.engine.checkpoint import Checkpoint
from flowrl.engine.cluster import Cluster
from flowrl.engine.samples import Sampler
from flowrl.engine.saver import Saver, load, written_at_the_end
from flowrl.engine.store import Store
from flowrl.engine.sync import WeightSync
from flowrl.engine.tally import Tally
from flowrl.engine.validation import admit, validate
from flowrl.errors import RunError
from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.rows import Rows
from flowrl.schedule.base import Progress, Schedule, Task
from flowrl.schedule.record import Event, Recorder
from flowrl.schedule.sync import Sync

LATE_SECONDS = 60.0
"""After so long without any news the log says who is late."""
MAX_ATTEMPTS = 3
MAX_QUEUED = 2
"""Calls of a worker that run or wait: the next one starts without the driver in between."""


@dataclass(frozen=True)
class Arrival:
    """Something that a worker has sent: a block of a call, or the end of a weight sync."""

    node: str
    receipt: Receipt
    refs: Sequence[Any]


class Loop:
    """Runs a plan on a cluster, from a checkpoint on where one is given; a saver makes others."""

    def __init__(
        self,
        plan: Plan,
        workers: Sequence[WorkerSetup],
        cluster: Cluster,
        prompts: PromptStream,
        recorder: Recorder,
        validation: Mapping[str, Sequence[Prompt]] | None = None,
        saver: Saver | None = None,
        resumed: Checkpoint | None = None,
    ) -> None:
        """`validation` holds the rows of every evaluation, by its name."""
        self.validation = validation or {}
        self.plan, self.cluster, self.prompts, self.recorder = plan, cluster, prompts, recorder
        self.schedule: Schedule = Sync(plan.document.batch.prompts)
        self.workers = {name: [w.name for w in workers if w.pool == name] for name in plan.pools}
        self.weight_sync = WeightSync(plan, cluster, self.workers)
        self.saver, self.resumed = saver, resumed
        self.store = Store()
        self.sampler = Sampler(plan, cluster, recorder)
        self.load = Counter[str]()
        self.changed: set[str] = set()
        self.trains = any(node.weights == "updates" for node in plan.graph.nodes.values())
        self.updated = False
        self.unrecorded: list[Event | tuple[int, int, dict[str, float]]] = []
        self.versions = dict.fromkeys(plan.document.models, 0)
        self.arrivals: asyncio.Queue[Arrival | BaseException] = asyncio.Queue()
        self.running: set[asyncio.Task[None]] = set()
        self.ranks_left: dict[tuple[str, tuple[str, ...]], int] = {}
        self.failed_attempts: dict[tuple[str, str], int] = {}
        self.tally = Tally(0)

    async def train(self) -> None:
        """THE LOOP: for every step, submit what is ready, collect what settles, release what is read, record."""
        num_steps = self.plan.document.run.steps
        try:
            async with written_at_the_end(self.saver):
                for step in range(await self.restore() + 1, num_steps + 1):
                    await self.walk(self.begin(step))
                    self.sampler.end(step)
                    metrics = self.tally.metrics()
                    self.unrecorded.append((step, num_steps, metrics | await validate(self, step)))
                    await self.save(step)
        finally:
            self.record()
            await self.sampler.close()

    async def walk(self, progress: Progress) -> None:
        """One walk through the graph, to its end."""
        while not progress.complete:
            for task in progress.ready():
                self.submit(task, progress)
            self.collect(await self.next_arrival(progress), progress)
            self.store.release(progress.released())
        self.store.clear()

    async def restore(self) -> int:
        """Go on from the checkpoint, if there is one: the last step that it holds. Else validate what is there."""
        if self.resumed is None:
            if measured := await validate(self, 0):
                self.unrecorded.append((0, self.plan.document.run.steps, measured))
            return 0
        self.recorder.stage(f"loading the checkpoint of step {self.resumed.step}")
        workers = [worker for names in self.workers.values() for worker in names]
        await load(self.resumed, self.cluster, workers)
        self.versions |= {name: version for name, version in self.resumed.versions.items() if name in self.versions}
        await self.weight_sync.push_all(self.versions)
        return self.resumed.step

    async def save(self, step: int) -> None:
        """Take a checkpoint at the end of a step where one is due; what was recorded of the step comes before it."""
        if self.saver is not None and self.saver.is_due(step, self.updated):
            self.record()
            await self.saver.save(step, self.versions, self.prompts.state(), self.arrivals.put_nowait)

    def begin(self, step: int) -> Progress:
        """Admit the prompts of a step: their columns are what the first nodes read."""
        self.tally, self.failed_attempts = Tally(step, max(self.versions.values(), default=0)), {}
        self.updated = not self.trains
        prompts, graph = self.prompts.take(self.schedule.num_to_admit(num_in_flight=0)), self.plan.of_step(step)
        batch = admit(self, graph, prompts, self.plan.document.batch.group)
        self.sampler.begin(step, batch)
        return Progress(graph, step, batch.rows.uids, self.plan.canonical_groups)

    def submit(self, task: Task, progress: Progress) -> None:
        """Start a task on free workers of its pool; without a free one it stays ready."""
        node = self.plan.graph.nodes[task.node]
        workers = self.place(node)
        if not workers:
            return
        if node.weights == "syncs":
            progress.submit(node.name, task.uids)
            self.start(self.sync(node, task, workers), node, workers)
            return
        parts = self.store.find(node.fields_read, task.uids)
        progress.submit(node.name, task.uids)
        if node.weights == "updates" and not any(len(part.rows) for part in parts):
            raise RunError(f"{progress.title}: no trajectory is left to train on", node=node.name, rows=task.uids)
        shares = [task.uids] * len(workers)
        if node.weights in (None, "generates"):
            shares = [task.uids[rank :: len(workers)] for rank in range(len(workers))]
        shares = [share for share in shares if share]
        if node.weights in ("reads", "updates"):
            self.ranks_left[node.name, task.uids] = len(shares)
        for worker, uids in zip(workers, shares, strict=False):
            attempt = 1 + max(self.failed_attempts.get((node.name, uid), 0) for uid in uids)
            samples = self.sampler.asked_of(node, uids)
            call = Call(node.name, task.step, uids, attempt, self.block_groups(node), samples, progress.asked)
            # Nothing queues behind a stream: what it would start on depends on the clock.
            load = MAX_QUEUED if call.block_groups is not None else 1
            self.start(self.run(worker, call, [part.ref for part in parts], load), node, [worker] * load)

    def place(self, node: BoundNode) -> list[str]:
        """The workers that a task goes to, none if they are busy.

        All ranks for a node with a model, all free ones for rows that are scored alone, else any one. A node that
        computes on all ranks may queue behind another such node; all ranks see the same order.
        """
        pools = [self.plan.pool_of(node)]
        if node.weights == "syncs":
            pools = sorted({*pools, *self.plan.engine_pools(node.model)})
        names = [worker for pool in pools for worker in self.workers[pool]]
        if node.weights == "generates":
            names = names[:: node.workers_per_copy]  # the first worker of each copy speaks for the others
        if node.weights is None:
            free = [name for name in names if not self.load[name]]
            return free if node.scores_rows else free[:1]
        # A call with a timeout must not spend it waiting.
        limit = MAX_QUEUED if node.weights in ("reads", "updates") and node.spec.timeout is None else 1
        return names if all(self.load[name] < limit for name in names) else []

    def block_groups(self, node: BoundNode) -> int | None:
        """A stream of finished groups, for nodes that make trajectories; None is one block at the end."""
        if node.cls.cardinality != "expands":
            return None
        return self.plan.groups_per_block

    def start(self, work: Coroutine[Any, Any, None], node: BoundNode, workers: Sequence[str]) -> None:
        """Let work run beside the loop; its workers are busy until it ends, its error becomes an arrival."""
        self.load.update(workers)
        limit = None if node.scores_rows else node.spec.timeout  # rows that are scored alone have it each

        async def guarded() -> None:
            try:
                async with asyncio.timeout(limit):
                    await work
            except TimeoutError:
                late = RunError(
                    f"no end within its timeout of {limit:g} s",
                    node=node.name,
                    worker=", ".join(dict.fromkeys(workers)),
                )
                self.arrivals.put_nowait(late)
            except (Exception, KeyboardInterrupt) as error:  # with --local a second Ctrl-C strikes in here
                self.arrivals.put_nowait(error)

        task = asyncio.ensure_future(guarded())
        self.running.add(task)
        task.add_done_callback(self.running.discard)

    async def run(self, worker: str, call: Call, refs: Sequence[Any], load: int) -> None:
        """One call of a node on one worker; its blocks arrive one by one."""
        num_outputs = len(self.plan.outputs[call.node]) + bool(call.samples)
        async for receipt, returned in self.cluster.call(worker, call, refs, num_outputs):
            if receipt.last:
                self.load[worker] -= load
            self.arrivals.put_nowait(Arrival(call.node, receipt, returned))

    async def sync(self, node: BoundNode, task: Task, workers: Sequence[str]) -> None:
        """Send the trained weights, if they have changed, to every engine of the model, as the next version."""
        assert node.model is not None, "checked before"
        start, sender = time.time(), self.weight_sync.senders(node)[0]
        if node.model in self.changed:
            version = self.versions[node.model] + 1
            await self.weight_sync.push(node, version)
            self.versions[node.model] = version
            self.changed.remove(node.model)
        self.load.subtract(workers)
        receipt = Receipt(node.name, task.step, 1, sender, Rows(()), task.uids, start, time.time(), 0, 0)
        self.arrivals.put_nowait(Arrival(node.name, receipt, ()))

    async def next_arrival(self, progress: Progress) -> Arrival:
        """Wait for news; say who is late; raise what went wrong."""
        self.record()
        while True:
            if not self.running and self.arrivals.empty():
                raise RunError(f"nothing is running and nothing can start; waiting for {dict(progress.waiting())}")
            try:
                async with asyncio.timeout(LATE_SECONDS):  # unlike wait_for, it never swallows a Ctrl-C
                    arrival = await self.arrivals.get()
            except TimeoutError:
                late = ", ".join(f"{name} ({num} groups)" for name, num in progress.waiting().items())
                self.recorder.note(f"{progress.title}: no news for {LATE_SECONDS:g} s, waiting for {late}", "warning")
                continue
            if isinstance(arrival, BaseException):
                raise arrival
            return arrival

    def collect(self, arrival: Arrival, progress: Progress) -> None:
        """Take in a block: where its columns lie, what it reports, and which groups are settled by it."""
        receipt, node = arrival.receipt, self.plan.graph.nodes[arrival.node]
        self.tally.add(receipt)
        self.unrecorded.append(self.event(node, receipt))
        if receipt.failed:
            self.retry_or_raise(node, receipt, progress)
            return
        if node.weights == "updates" and receipt.changed and node.model is not None:
            self.changed.add(node.model)
            self.updated = True
        for ref, fields in zip(arrival.refs, receipt.fields, strict=False):
            self.store.add(ref, fields, receipt.rows)
        if receipt.sampled:
            self.sampler.add(arrival.refs[len(receipt.fields)])
        ranks_left = self.ranks_left.pop((node.name, receipt.settled), 1) - 1
        if ranks_left:
            self.ranks_left[node.name, receipt.settled] = ranks_left
        else:
            progress.settle(node.name, receipt.settled)
        if progress.is_done(node.name):
            self.tally.refuse_failures(receipt, self.plan.document.run.max_failed)

    def record(self) -> None:
        """Write down what was collected; left until the workers have been given their next tasks."""
        for event in self.unrecorded:
            if isinstance(event, Event):
                self.recorder.event(event)
            else:
                self.recorder.step(*event)
        self.unrecorded.clear()

    def retry_or_raise(self, node: BoundNode, receipt: Receipt, progress: Progress) -> None:
        """A call that failed as a whole: its groups are ready again where asked for, else the run ends."""
        if node.on_error == "retry" and receipt.attempt < MAX_ATTEMPTS:
            self.failed_attempts |= {(node.name, uid): receipt.attempt for uid in receipt.settled}
            progress.retry(node.name, receipt.settled)
            return
        worst = receipt.failures[-1]
        rows = worst.rows or receipt.settled
        raise RunError(worst.error, node=node.name, worker=receipt.worker, rows=rows, details=worst.traceback)

    def event(self, node: BoundNode, receipt: Receipt) -> Event:
        """The record of a block."""
        return Event(
            receipt.step, node.name, receipt.attempt, receipt.worker, self.versions.get(node.model or "", 0),
            tuple(receipt.rows.names()), receipt.start, receipt.end, receipt.bytes_in, receipt.bytes_out,
            node.fields_read, tuple(node.writes.values()), receipt.failures,
        )  # fmt: skip
