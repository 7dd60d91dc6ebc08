"""A cluster whose workers only take time: what they would have computed does not matter to a schedule."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from flowrl.batch import Batch, Prompt
from flowrl.engine.call import Call, Receipt, WorkerSetup
from flowrl.engine.worker import block_is_full
from flowrl.graph.bind import BoundNode
from flowrl.graph.origins import origins_of
from flowrl.graph.plan import Plan
from flowrl.metrics import Metric
from flowrl.rows import Rows
from flowrl.simulate.costs import Costs
from flowrl.simulate.serving import Served, Serving

ASLEEP, UPDATING = "asleep", "updating"


@dataclass(frozen=True)
class Span:
    """Something that a worker did."""

    worker: str
    node: str
    step: int
    """In which it was; for generation, which is of no step in particular, 0."""
    start: float
    end: float
    """Seconds since the start."""


@dataclass(frozen=True)
class Trained:
    """A group that was trained."""

    time: float
    staleness: int
    """Versions that its oldest token was behind."""
    tokens: float


class SimulatedWorker:
    """One worker: it does one thing at a time, and generates beside that."""

    def __init__(self, setup: WorkerSetup, plan: Plan, costs: Costs, spans: list[Span]) -> None:
        self.setup, self.turn, self._spans = setup, asyncio.Lock(), spans
        self.serving = {
            node.name: Serving(costs.decoding[node.name], partial(self._served, plan.graph.nodes[node.name]))
            for node in setup.nodes
            if node.name in costs.decoding
        }

    def lend_device(self, *, asleep: bool) -> None:
        """Let its engines sleep while something else computes with a model, or wake."""
        for serving in self.serving.values():
            serving.stop(ASLEEP) if asleep else serving.go(ASLEEP)

    def _served(self, node: BoundNode, start: float, end: float) -> None:
        """By this worker, and the others that hold a part of the same copy of the model."""
        for rank in range(self.setup.rank, self.setup.rank + node.workers_per_copy):
            self._spans.append(Span(f"{self.setup.pool}/{rank}", node.name, 0, start, end))


class SimulatedCluster:
    """See the module docstring; implements `engine.cluster.Cluster`. A trajectory stands for all those of its group.

    What is drawn is drawn by the seed of the run and the name of a group, so it is the same under every schedule.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs, self._seed = plan, costs, plan.document.run.seed
        self.workers: dict[str, SimulatedWorker] = {}
        self.spans: list[Span] = []
        self.trained: list[Trained] = []
        self._versions = Counter[str]()
        self._groups: dict[str, dict[str, Served]] = defaultdict(dict)
        """By node that generates, what it has made."""
        self._origins = origins_of(plan.graph)
        self._num_calls = 0

    def start(self, workers: Sequence[WorkerSetup]) -> None:
        """All of them at once."""
        self.workers = {setup.name: SimulatedWorker(setup, self.plan, self.costs, self.spans) for setup in workers}

    def put(self, batch: Batch) -> Rows:
        """Whose columns they are."""
        return batch.rows

    async def call(
        self, worker: str, call: Call, refs: Sequence[Any], num_outputs: int
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        """Let the time pass that the node takes."""
        node, at = self.plan.graph.nodes[call.node], self.workers[worker]
        await asyncio.sleep(self.costs.call_seconds)
        if call.serves:
            async for block in self._generate(at, node, call):
                yield block
            return
        async with at.turn:
            if node.weights is not None:
                at.lend_device(asleep=node.weights != "generates")
            blocks = self._generate if node.weights == "generates" else self._compute
            async for block in blocks(at, node, call):
                yield block

    async def _compute(
        self, at: SimulatedWorker, node: BoundNode, call: Call
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        """A call of a node that does not generate; ranks share the groups of a model's batch."""
        shared = node.weights in ("reads", "updates")
        num_ranks, rank = (at.setup.num_ranks, at.setup.rank) if shared else (1, 0)
        start = _now()
        await asyncio.sleep(self.costs.group_seconds[node.name] * len(call.uids) / num_ranks)
        self.spans.append(Span(at.setup.name, node.name, call.step, start, _now()))
        if node.weights == "updates" and rank == 0:
            self._train(node, call.uids)
        yield self._block(at, node, call, call.uids[rank::num_ranks], call.uids, start, last=True)

    def _train(self, node: BoundNode, uids: Sequence[str]) -> None:
        """What the rows of these groups are made of, where the model that is trained has made it itself."""
        rollouts = [
            name for name in self._origins.get(node.name, ()) if self.plan.graph.nodes[name].model == node.model
        ]
        for uid in uids:
            if made := [self._groups[name].pop(uid) for name in rollouts if uid in self._groups[name]]:
                staleness = self._versions[node.model or ""] - min(each.version for each in made)
                self.trained.append(Trained(_now(), staleness, sum(each.response.tokens for each in made)))

    async def _generate(
        self, at: SimulatedWorker, node: BoundNode, call: Call
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        """Groups as they end, in the blocks that a worker would send."""
        serving, start = at.serving[node.name], _now()
        self._num_calls += 1
        lengths = self.costs.decoding[node.name].lengths
        ended = [serving.add(uid, self._num_calls, lengths.response(self._random(uid, node.name))) for uid in call.uids]
        settled: list[str] = []
        num_left = len(call.uids)
        for group in asyncio.as_completed(ended):
            done = await group
            self._groups[node.name][done.uid] = done
            settled.append(done.uid)
            last = len(settled) == num_left
            if last or block_is_full(call, len(settled), _now() - start):
                yield self._block(at, node, call, settled, settled, start, last=last)
                num_left -= len(settled)
                settled, start = [], _now()

    def _block(
        self, at: SimulatedWorker, node: BoundNode, call: Call, uids: Sequence[str], settled: Sequence[str],
        start: float, *, last: bool,
    ) -> tuple[Receipt, list[Any]]:  # fmt: skip
        rows = Rows(uids, range(len(uids)), [0] * len(uids))
        fields, metrics, oldest = self.plan.outputs[node.name], list[Metric](), {}
        if node.weights == "generates":
            made = self._groups[node.name]
            metrics.append(Metric("rollout/tokens", sum(made[uid].response.tokens for uid in uids), 1, "sum"))
            oldest = {uid: made[uid].version for uid in uids} if "policy_version" in node.writes else {}
        receipt = Receipt(
            node.name, call.step, call.attempt, at.setup.name, rows, tuple(settled), start, _now(), 0, 0,
            tuple(metrics), last=last, fields=fields, oldest=oldest,
        )  # fmt: skip
        return receipt, [rows] * len(fields)

    def _random(self, uid: str, what: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(f"{uid} {what}".encode())])

    def fetch(self, refs: Sequence[Any]) -> list[Any]:
        """What a gate says: it keeps each group with the same chance."""
        gate = self.plan.gate
        assert gate is not None and gate.spec.gate is not None, "nothing else is read"
        return [
            Batch(rows, {gate.spec.gate: Prompt(rows, np.array([self._keeps(uid) for uid in rows.uids]))}, {})
            for rows in refs
        ]

    def _keeps(self, uid: str) -> bool:
        return bool(self._random(uid, "gate").random() < self.costs.kept)

    async def pause(self, worker: str) -> None:
        """Its engines make no token."""
        self.workers[worker].lend_device(asleep=True)

    async def resume(self, worker: str) -> None:
        """They go on."""
        self.workers[worker].lend_device(asleep=False)

    async def abort(self, worker: str, node: str, uids: Sequence[str]) -> None:
        """End groups now."""
        self.workers[worker].serving[node].abort(uids)

    async def receiver(self, worker: str, node: str) -> None:
        """Nothing."""

    async def send(self, worker: str, node: str, receivers: Sequence[Any]) -> AsyncIterator[None]:
        """All weights at once, from the first rank."""
        if self.workers[worker].setup.rank == 0:
            yield None

    async def receive(self, worker: str, node: str, part: Any, version: int) -> None:
        """Engines of the model stand still until they have the weights."""
        at, model, start = self.workers[worker], self.plan.graph.nodes[node].model, _now()
        engines = [each for name, each in at.serving.items() if self.plan.graph.nodes[name].model == model]
        for serving in engines:
            serving.stop(UPDATING)
        await asyncio.sleep(self.costs.sync_seconds[node])
        self.spans.append(Span(worker, node, 0, start, _now()))
        self._versions[model or ""] = version
        for serving in engines:
            serving.version = version
            serving.go(UPDATING)

    async def save(self, worker: str, folder: str) -> int:
        """Checkpoints are left out."""
        return 0

    async def written(self, worker: str) -> Mapping[str, int]:
        """Nothing."""
        return {}

    async def restore(self, worker: str, folder: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing was started; engines that are busy have been so until now."""
        for worker in self.workers.values():
            worker.lend_device(asleep=True)


def _now() -> float:
    return asyncio.get_running_loop().time()
