"""The metrics of one step: what the nodes reported, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

from flowrl.engine.call import Receipt
from flowrl.engine.clock import now
from flowrl.errors import RunError
from flowrl.metrics import Failure, Metric, merge

Interval = tuple[float, float]


class Tally:
    """Collects receipts of a step."""

    def __init__(self, step: int, version: int = 0) -> None:
        """`version` is that of the weights at the start of the step."""
        self.step, self._version = step, version
        self._start = now()
        self._metrics: dict[str, list[Sequence[Metric]]] = {}
        self._intervals: dict[str, list[Interval]] = {}
        self._num_rows = Counter[str]()
        self.failures: dict[str, list[Failure]] = {}
        """By node, what went wrong in this step."""

    def report(self, receipts: Iterable[Receipt]) -> None:
        """What these blocks report is of this step."""
        for receipt in receipts:
            self._metrics.setdefault(receipt.node, []).append(receipt.metrics)

    def add(self, receipt: Receipt, held: bool = False) -> None:
        """A block has arrived in this step; what it reports may be held back for a later one."""
        if not held:
            self.report([receipt])
        self._ran(receipt.node, receipt.start, receipt.end)
        names = {name for failure in receipt.failures for name in failure.rows}
        self._num_rows[receipt.node] += len(receipt.rows) + len(names.difference(receipt.rows.names()))
        self.failures.setdefault(receipt.node, []).extend(receipt.failures)

    def _ran(self, node: str, start: float, end: float) -> None:
        """What began before the step counts from the step's start on."""
        self._intervals.setdefault(node, []).append((max(start, self._start), end))

    def num_failed(self, node: str) -> int:
        """Rows of a node that went wrong; a failure that names none counts as one."""
        return sum(max(1, len(failure.rows)) for failure in self.failures.get(node, ()))

    def num_rows(self, node: str) -> int:
        """Rows that a node has written or failed on."""
        return self._num_rows[node]

    def reported(self, node: str) -> dict[str, float]:
        """What a node has reported."""
        return {name: part.value for name, part in merge(self._metrics.get(node, ())).items()}

    def refuse_failures(self, receipt: Receipt, limit: float) -> None:
        """Raises `RunError` where more than this share of the rows of a node, which has ended, went wrong.

        Rows that fail are left out; when most of a step's are, what is left says little, and nobody looks.
        """
        num_failed, num_rows = self.num_failed(receipt.node), self.num_rows(receipt.node)
        if num_failed > limit * num_rows:
            first = self.failures[receipt.node][0]
            share = f"{num_failed} of {num_rows} rows of step {receipt.step} failed (run.max_failed: {limit:g})"
            share = share if num_failed < num_rows else f"every row of step {receipt.step} failed"
            raise RunError(f"{share}, the first with {first.error}", node=receipt.node, worker=receipt.worker,
                           rows=first.rows, details=first.traceback)  # fmt: skip

    def metrics(self, front: Collection[str] = (), unended: Iterable[tuple[str, float]] = ()) -> dict[str, float]:
        """All metrics of the step; call it when the step has ended, with node and beginning of calls that have not.

        `time/step` is wall time, `time/<node>` the time in which the node was running anywhere, `time/engine` the
        part of the step in which no node was running at all, and `time/wait_for_samples` that in which none was
        running that is not of the `front`. Seconds. Raises `RunError` for a node that reports a
        metric of one of these names.
        """
        end, num_failed = now(), sum(map(self.num_failed, self.failures))
        wall = end - self._start
        for node, since in unended:
            self._ran(node, since, end)
        values = {name: part.value for name, part in merge(chain.from_iterable(self._metrics.values())).items()}
        busy = covered(span for spans in self._intervals.values() for span in spans)
        behind = covered(span for node, spans in self._intervals.items() if node not in front for span in spans)
        measured = {f"time/{node}": covered(spans) for node, spans in self._intervals.items()}
        measured |= {"time/step": wall, "time/engine": max(0.0, wall - busy), "rows/failed": float(num_failed)}
        measured["time/wait_for_samples"] = max(0.0, wall - behind)
        if "rollout/tokens" in values:
            measured["throughput/tokens_per_s"] = values["rollout/tokens"] / wall
        for who in ("rollout", "actor"):  # what was trained tells more, where the update reads it
            if f"{who}/policy_version/min" in values:
                measured["staleness/mean"] = self._version - values[f"{who}/policy_version/mean"]
                measured["staleness/max"] = self._version - values[f"{who}/policy_version/min"]
        if taken := sorted(values.keys() & {*measured, "step"}):
            raise RunError(f"a node reports the metric '{taken[0]}', which the engine measures: give it another name")
        return values | measured


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
