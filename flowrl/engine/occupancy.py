"""Which part of their time workers have nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from flowrl.engine.clock import now
from flowrl.engine.tally import Interval, covered


class Occupancy:
    """What workers have done since the last `begin`: what they report of calls, and calls that have not ended yet."""

    def __init__(self, workers: Mapping[str, Sequence[str]]) -> None:
        """`workers` are their names by pool."""
        self._workers, self._running = workers, dict[object, tuple[str, Sequence[str], float]]()
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._start = now()
        self._spans: dict[str, list[Interval]] = {}

    def add(self, worker: str, start: float, end: float) -> None:
        """A worker has worked, perhaps on what began earlier."""
        self._spans.setdefault(worker, []).append((max(start, self._start), end))

    @contextmanager
    def running(self, node: str, workers: Sequence[str]) -> Iterator[Callable[[], object]]:
        """A call of these has not ended, until the block is left or what it is given is called."""
        call = object()
        self._running[call] = node, workers, now()
        ended = partial(self._running.pop, call, None)
        try:
            yield ended
        finally:
            ended()

    @property
    def unended(self) -> list[tuple[str, float]]:
        """Node and beginning of each call that has not ended."""
        return [(node, since) for node, _, since in self._running.values()]

    def idle(self) -> dict[str, float]:
        """`idle/POOL`: the share of the time of a pool's workers in which they had nothing to do."""
        spans, end = {worker: [*found] for worker, found in self._spans.items()}, now()
        for _, workers, since in self._running.values():
            for worker in workers:
                spans.setdefault(worker, []).append((max(since, self._start), end))
        wall = max(end - self._start, 1e-9)
        busy = {pool: sum(covered(spans.get(worker, ())) for worker in names) for pool, names in self._workers.items()}
        return {f"idle/{pool}": max(0.0, 1 - busy[pool] / (len(names) * wall)) for pool, names in self._workers.items()}
