"""One simulated run, and what is to be said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from flowrl.data.rows import Row
from flowrl.data.stream import PromptStream
from flowrl.engine.loop import Loop
from flowrl.engine.setup import worker_setups
from flowrl.engine.tally import covered
from flowrl.fields import Dtype
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.schedule.record import Recorder
from flowrl.simulate.clock import simulated
from flowrl.simulate.cluster import SimulatedCluster, Span, Trained
from flowrl.simulate.costs import Costs
from flowrl.simulate.variants import Team

MOST_WARM_UP = 5
"""Steps before the run is what it will be for the rest; of a short run, a quarter of its steps."""
NOTHING: Mapping[Dtype, Any] = {"int": 0, "float": 0.0, "bool": False, "str": "", "json": None}


@dataclass(frozen=True)
class Outcome:
    """A simulated run."""

    plan: Plan
    team: Team
    ends: tuple[float, ...]
    """When each step ended, in seconds since the start."""
    spans: tuple[Span, ...]
    """What workers did, by time."""
    trained: tuple[Trained, ...]
    given_up: Mapping[str, int]
    """Groups by the reason why they were not trained."""

    @property
    def warm_up(self) -> int:
        """Steps that no figure counts."""
        return min(MOST_WARM_UP, len(self.ends) // 4)

    @property
    def window(self) -> tuple[float, float]:
        """Begin and end of the steps that figures are about."""
        return (self.ends[self.warm_up - 1] if self.warm_up else 0.0), self.ends[-1]

    @property
    def step_seconds(self) -> float:
        """Of a step, on average."""
        start, end = self.window
        return (end - start) / (len(self.ends) - self.warm_up)

    @property
    def median_seconds(self) -> float:
        """Median of the steps; far from the average where long steps and short ones take turns."""
        seconds = [end - start for start, end in zip((0.0, *self.ends), self.ends, strict=False)]
        return median(seconds[self.warm_up :])

    @property
    def tokens_per_second(self) -> float:
        """Response tokens that were trained."""
        start, end = self.window
        return sum(each.tokens for each in self.trained if start < each.time <= end) / (end - start)

    @property
    def idle(self) -> dict[str, float]:
        """By pool, the share of its workers' time in which they did nothing."""
        return {name: self._idle([name]) for name in self.plan.pools}

    @property
    def bubble(self) -> float:
        """The same of all workers that hold models."""
        return self._idle([name for name, pool in self.plan.pools.items() if pool.holds_model])

    def _idle(self, pools: Sequence[str]) -> float:
        start, end = self.window
        workers = [f"{name}/{rank}" for name in pools for rank in range(self.plan.pools[name].workers)]
        by_worker: dict[str, list[tuple[float, float]]] = {name: [] for name in workers}
        for span in self.spans:
            if span.worker in by_worker and span.end > start and span.start < end:
                by_worker[span.worker].append((max(span.start, start), min(span.end, end)))
        return max(0.0, 1 - sum(map(covered, by_worker.values())) / (len(workers) * (end - start)))

    @property
    def staleness(self) -> dict[int, float]:
        """By the versions that the oldest token of a trained group was behind, the share of these groups."""
        start, end = self.window
        found = Counter(each.staleness for each in self.trained if start < each.time <= end)
        return {age: found[age] / found.total() for age in sorted(found)}


class _Prompts(Sequence[Row]):
    """As many rows as anybody may want, all alike."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, position: Any) -> Any:
        return self._row


class _Steps(Recorder):
    """Remembers how long each step was."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Steps follow each other without a break."""
        self.seconds.append(metrics["time/step"])


def simulate(plan: Plan, team: Team, costs: Costs) -> Outcome:
    """Run a plan on a clock that jumps. Raises `RunError` where the run would."""

    async def run() -> Outcome:
        cluster, steps, workers = SimulatedCluster(plan, costs), _Steps(), worker_setups(plan, num_cores=1)
        cluster.start(workers)
        loop = Loop(plan, workers, cluster, PromptStream(_Prompts(_row(plan)), 0, shuffle=False), steps)
        await loop.train()
        cluster.close()
        spans = sorted(cluster.spans, key=lambda span: (span.start, span.end))
        given_up = {str(reason): num for reason, num in loop.front.flow.given_up.items()}
        return Outcome(plan, team, tuple(accumulate(steps.seconds)), tuple(spans), tuple(cluster.trained), given_up)

    return simulated(run())


def _row(plan: Plan) -> Row:
    return dict(_columns(plan))


def _columns(plan: Plan) -> Iterator[tuple[str, Any]]:
    for field in plan.graph.fields.values():
        if field.writer == DATA:
            yield field.name, NOTHING[field.type.dtype]
