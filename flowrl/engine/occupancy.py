"""Which part of their time workers have nothing to do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from flowrl.engine.clock import now


class Occupancy:
    """Of the workers of each pool, seen from the driver: a worker is busy from a call's submission to its end."""

    def __init__(self, workers: Mapping[str, Sequence[str]]) -> None:
        """`workers` are their names by pool."""
        self._workers, self._num_calls = workers, Counter[str]()
        self.begin()

    def begin(self) -> None:
        """Measure from now on."""
        self._start = now()
        self._seconds: dict[str, float] = defaultdict(float)
        self._since = dict.fromkeys(self._num_calls, self._start)

    @contextmanager
    def busy(self, workers: Sequence[str]) -> Iterator[None]:
        """These have something to do meanwhile."""
        for worker in workers:
            if not self._num_calls[worker]:
                self._since[worker] = now()
            self._num_calls[worker] += 1
        try:
            yield
        finally:
            for worker in workers:
                self._num_calls[worker] -= 1
                if not self._num_calls[worker]:
                    self._seconds[worker] += now() - self._since[worker]

    def idle(self) -> dict[str, float]:
        """`idle/POOL`: the share of the workers' time since the last `begin` in which they had nothing to do."""
        wall = now() - self._start
        return {
            f"idle/{pool}": max(0.0, 1 - sum(map(self._busy, workers)) / (len(workers) * wall)) if wall else 0.0
            for pool, workers in self._workers.items()
        }

    def _busy(self, worker: str) -> float:
        running = now() - self._since[worker] if self._num_calls[worker] else 0.0
        return self._seconds[worker] + running
