"""The main loop: `Loop.train`. Everything else in this module serves it.

Prompts flow: each is admitted, generated and scored in the *front* of the graph, whatever the step. The schedule cuts
batches of their groups, and a step walks each batch through the rest. A node is submitted as soon as its inputs and a
worker are there; whatever settles next is collected, recorded, and may make others ready. Columns stay in the object
store; the driver holds references and identities.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from flowrl.data.stream import Prompt, PromptStream
from flowrl.engine.call import Receipt, WorkerSetup
from flowrl.engine.checkpoint import Checkpoint
from flowrl.engine.cluster import Cluster
from flowrl.engine.dispatch import Arrival, Dispatcher, Late
from flowrl.engine.front import Front
from flowrl.engine.samples import Sampler
from flowrl.engine.saver import Saver, load, written_at_the_end
from flowrl.engine.store import Store
from flowrl.engine.tally import Tally
from flowrl.engine.validation import validate
from flowrl.errors import RunError
from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.schedule.base import Progress
from flowrl.schedule.policy import schedule_of
from flowrl.schedule.record import Event, Recorder

LATE_SECONDS = 60.0
"""After so long without any news the log says who is late."""
MAX_ATTEMPTS = 3


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
        self.plan, self.cluster, self.recorder = plan, cluster, recorder
        self.saver, self.resumed = saver, resumed
        self.schedule, self.store, self.sampler = schedule_of(plan), Store(), Sampler(plan, cluster, recorder)
        names = {name: [worker.name for worker in workers if worker.pool == name] for name in plan.pools}
        self.dispatcher = Dispatcher(plan, cluster, names, self.store, self.sampler, self.schedule.serves)
        self.front = Front(plan, self.schedule, prompts, self.dispatcher)
        self.trains = any(node.weights == "updates" for node in plan.graph.nodes.values())
        self.updated = False
        self.version, self.synced = 0, dict(self.dispatcher.versions)
        """Steps that have synced anything, by which age is counted; and the versions of each model after these."""
        self.unrecorded: list[Event | tuple[int, int, dict[str, float]]] = []
        self.ranks_left: dict[tuple[str, tuple[str, ...]], int] = {}
        self.tally = self.measured = Tally()
        """What was measured in this step, and in the validation that is going on."""

    async def train(self) -> None:
        """THE LOOP: for every step, walk its batches through the graph, sync, record."""
        try:
            async with written_at_the_end(self.saver):
                for step in range(await self.restore() + 1, self.plan.document.run.steps + 1):
                    self.begin(step)
                    for number in range(self.plan.updates_per_sync):
                        batch = await self.next_batch(step, number)
                        await self.walk(batch)
                    await self.end(step)
        finally:
            self.record()
            await self.sampler.close()

    def begin(self, step: int) -> None:
        """A step begins, with the weights of the last sync."""
        nodes = self.plan.graph.nodes.values()
        self.tally.begin(step, {node.name: self.synced[node.model] for node in nodes if node.model in self.synced})
        self.dispatcher.failed_attempts = {}
        self.updated = not self.trains
        self.dispatcher.occupancy.begin()
        self.front.begin(step)

    async def next_batch(self, step: int, number: int) -> Progress:
        """Let prompts flow until the schedule cuts a batch of their groups."""
        self.front.admit(self.version)
        while (uids := self.front.cut(self.version)) is None:
            self.submit(self.front.progress)
            self.collect(await self.next_arrival(self.front.progress))
            self.front.admit(self.version)
        self.tally.report(self.front.reported())
        if self.schedule.pauses:
            await self.dispatcher.pause()
        graph = self.plan.of_batch(step, number)
        if not uids and self.dispatcher.changed:  # the gate has left nothing, yet earlier batches are to be synced
            graph, uids = graph.restricted(self.plan.syncs), self.front.flow.in_batches
        return Progress(graph, step, uids, self.plan.canonical_groups, front=self.front.progress)

    async def walk(self, progress: Progress) -> None:
        """Walk groups through the graph, to its end, while others flow."""
        while not progress.complete:
            self.submit(self.front.progress)
            self.submit(progress)
            self.collect(await self.next_arrival(progress))
            self.store.release(progress.released(), progress.uids)
            if self.schedule.serves and not self.dispatcher.paused and progress.asked is None:
                self.front.admit(self.version)  # in the place of groups that the gate has refused while a batch trains

    async def end(self, step: int) -> None:
        """The weights are synced: let rollouts go on, and write down what was measured."""
        if self.schedule.pauses:
            await self.dispatcher.resume()
        self.version, self.synced = self.newest, dict(self.dispatcher.versions)
        metrics = self.front.end() | self.dispatcher.occupancy.idle()
        self.tally.report(self.front.reported())
        metrics |= self.tally.metrics(self.plan.front, self.dispatcher.occupancy.unended)
        self.tally = Tally()  # of the next step, with what arrives during a validation
        metrics |= await validate(self, step)
        self.unrecorded.append((step, self.plan.document.run.steps, metrics))
        if self.saver is not None and self.saver.is_due(step, self.updated):
            self.record()
            state = {**self.front.state(), "version": self.version}
            held, failed = self.front.in_flight(), self.dispatcher.arrivals.put_nowait
            await self.saver.save(step, self.dispatcher.versions, state, held, failed)

    async def restore(self) -> int:
        """Go on from the checkpoint, if there is one: the last step that it holds. Else validate what is there."""
        if self.resumed is None:
            if measured := await validate(self, 0):
                self.unrecorded.append((0, self.plan.document.run.steps, measured))
            return 0
        self.recorder.stage(f"loading the checkpoint of step {self.resumed.step}")
        names = [worker for workers in self.dispatcher.workers.values() for worker in workers]
        await load(self.resumed, self.cluster, names)
        versions = self.dispatcher.versions
        versions |= {name: version for name, version in self.resumed.versions.items() if name in versions}
        await self.dispatcher.weight_sync.push_all(versions)
        if self.schedule.serves:
            await self.dispatcher.resume()  # engines have left the device's memory to the weights that were loaded
        state = self.resumed.data["state"]
        self.version, self.synced = state.get("version", max(versions.values(), default=0)), dict(versions)
        self.front.restore(state, self.resumed.in_flight(), self.version)
        return self.resumed.step

    @property
    def newest(self) -> int:
        """The version of the run with what this step has synced."""
        return self.version + (self.dispatcher.versions != self.synced)

    def ahead_of(self, model: str | None) -> int:
        """Versions of the run that are none of a model's: steps in which only others have changed."""
        return self.newest - self.dispatcher.versions[model] if model is not None else 0

    def submit(self, progress: Progress) -> None:
        """Start whatever is ready."""
        for task in progress.ready():
            num_calls = self.dispatcher.submit(task, progress)
            if num_calls > 1 and self.plan.graph.nodes[task.node].weights in ("reads", "updates"):
                self.ranks_left[task.node, task.uids] = num_calls

    async def next_arrival(self, progress: Progress) -> Arrival | Late:
        """Wait for news; say who is late, more and more seldom; raise what went wrong."""
        self.record()
        dispatcher, waited = self.dispatcher, 0.0
        while True:
            if not dispatcher.running and dispatcher.arrivals.empty():
                raise RunError(f"nothing is running and nothing can start; waiting for {dict(progress.waiting())}")
            pause = max(LATE_SECONDS, waited)
            try:
                async with asyncio.timeout(pause):  # unlike wait_for, it never swallows a Ctrl-C
                    arrival = await dispatcher.arrivals.get()
            except TimeoutError:
                waited += pause
                waiting = {**self.front.progress.waiting(), **progress.waiting()}
                late = ", ".join(f"{name} ({num} groups)" for name, num in waiting.items())
                self.recorder.note(f"{progress.title}: no news for {waited:g} s, waiting for {late}", "warning")
                continue
            if isinstance(arrival, BaseException):
                raise arrival
            return arrival

    def collect(self, arrival: Arrival | Late) -> None:
        """Take in a block: where its columns lie, what it reports, and which groups are settled by it."""
        if isinstance(arrival, Late):
            if groups := self.front.late(arrival):
                self.recorder.note(f"{arrival.progress.title}: {arrival.node.name} had no end within its timeout of "
                                   f"{arrival.node.spec.timeout:g} s on {arrival.worker}: {groups}",
                                   "warning")  # fmt: skip
            return
        receipt, progress = arrival.receipt, arrival.progress
        node = self.plan.graph.nodes[arrival.node]
        tally = self.tally if progress.asked is None else self.measured
        tally.add(receipt, held=progress is self.front.progress and self.front.holds(receipt))
        self.unrecorded.append(self.event(node, receipt))
        if receipt.failed:
            self.retry_or_raise(node, receipt, progress)
            return
        if node.weights == "updates" and receipt.changed and node.model is not None:
            self.dispatcher.changed.add(node.model)
            self.updated = True
        for ref, fields in zip(arrival.refs, receipt.fields, strict=False):
            self.store.add(ref, fields, receipt.rows)
        if receipt.sampled:
            self.sampler.add(arrival.refs[len(receipt.fields)])
        ranks_left = self.ranks_left.pop((node.name, receipt.settled), 1) - 1
        if ranks_left:
            self.ranks_left[node.name, receipt.settled] = ranks_left
        elif progress is self.front.progress:
            self.front.collect(arrival, self.ahead_of(node.model))
        else:
            progress.settle(node.name, receipt.settled)
        # Groups that flow are never done as a whole: a batch's worth of rows is enough to judge by.
        flows = progress is self.front.progress and tally.num_rows(node.name) >= self.plan.num_samples
        if flows or progress.is_done(node.name):
            tally.refuse_failures(receipt, self.plan.document.run.max_failed)

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
            failed = {(node.name, uid): receipt.attempt for uid in receipt.settled}
            self.dispatcher.failed_attempts |= failed
            progress.retry(node.name, receipt.settled)
            return
        worst = receipt.failures[-1]
        rows = worst.rows or receipt.settled
        raise RunError(worst.error, node=node.name, worker=receipt.worker, rows=rows, details=worst.traceback)

    def event(self, node: BoundNode, receipt: Receipt) -> Event:
        """The record of a block."""
        return Event(
            receipt.step, node.name, receipt.attempt, receipt.worker, self.dispatcher.versions.get(node.model or "", 0),
            tuple(receipt.rows.names()), receipt.start, receipt.end, receipt.bytes_in, receipt.bytes_out,
            node.fields_read, tuple(node.writes.values()), receipt.failures,
        )  # fmt: skip
