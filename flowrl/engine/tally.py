"""The metrics of one step: what the nodes reported, and where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from flowrl.engine.call import Receipt
from flowrl.engine.clock import now
from flowrl.errors import RunError
from flowrl.metrics import Failure, Metric, merge

Interval = tuple[float, float]


class Tally:
    """Collects receipts of a step."""

    def __init__(self, step: int = 0, versions: Mapping[str, int] | None = None) -> None:
        self.begin(step, versions or {})
        self._metrics: dict[str, list[Sequence[Metric]]] = {}
        self._intervals: dict[str, list[Interval]] = {}
        self._num_rows = Counter[str]()
        self.failures: dict[str, list[Failure]] = {}
        """By node, what went wrong in this step."""

    def begin(self, step: int, versions: Mapping[str, int]) -> None:
        """The step begins now, with these versions of the weights, by node; what has arrived before counts, but for its
        time.
        """
        self.step, self._versions = step, versions
        self._start = now()

    def report(self, receipts: Iterable[Receipt]) -> None:
        """What these blocks report is of this step."""
        for receipt in receipts:
            self._metrics.setdefault(receipt.node, []).append(receipt.metrics)

    def add(self, receipt: Receipt, held: bool = False) -> None:
        """A block has arrived in this step; what it reports may be held back for a later one."""
        if not held:
            self.report([receipt])
        self._intervals.setdefault(receipt.node, []).append((receipt.start, receipt.end))
        names = {name for failure in receipt.failures for name in failure.rows}
        self._num_rows[receipt.node] += len(receipt.rows) + len(names.difference(receipt.rows.names()))
        self.failures.setdefault(receipt.node, []).extend(receipt.failures)

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
        num_failed = sum(map(self.num_failed, self.failures))
        parts = {node: merge(groups) for node, groups in self._metrics.items()}
        values = {name: part.value for name, part in merge(reported.values() for reported in parts.values()).items()}
        measured = self._times(front, unended) | {"rows/failed": float(num_failed)}
        if "rollout/tokens" in values:
            measured["throughput/tokens_per_s"] = values["rollout/tokens"] / measured["time/step"]
        measured |= self._staleness("actor", parts) or self._staleness("rollout", parts)
        if taken := sorted(values.keys() & {*measured, "step"}):
            raise RunError(f"a node reports the metric '{taken[0]}', which the engine measures: give it another name")
        return values | measured

    def _staleness(self, who: str, parts: Mapping[str, Mapping[str, Metric]]) -> dict[str, float]:
        """How far tokens lag behind the weights that their model had when the step began; nothing if nobody says.

        `parts` is what was reported, by node.
        """
        lags: list[list[Metric]] = []
        for node, reported in parts.items():
            if oldest := reported.get(f"{who}/policy_version/min"):
                version, made = self._versions.get(node, 0), reported[f"{who}/policy_version/mean"]
                mean = Metric("staleness/mean", version * made.weight - made.total, made.weight, "mean")
                lags.append([mean, Metric("staleness/max", version - oldest.total, 1, "max")])
        return {name: part.value for name, part in merge(lags).items()}

    def _times(self, front: Collection[str], unended: Iterable[tuple[str, float]]) -> dict[str, float]:
        """Where the time went; what began before the step counts from its start on."""
        end, ran = now(), {node: [*spans] for node, spans in self._intervals.items()}
        for node, since in unended:
            ran.setdefault(node, []).append((since, end))
        ran = {node: [(max(start, self._start), stop) for start, stop in spans] for node, spans in ran.items()}
        wall, busy = end - self._start, covered(chain.from_iterable(ran.values()))
        behind = covered(chain.from_iterable(spans for node, spans in ran.items() if node not in front))
        times = {f"time/{node}": covered(spans) for node, spans in ran.items()}
        times |= {"time/step": wall, "time/engine": max(0.0, wall - busy)}
        return times | {"time/wait_for_samples": max(0.0, wall - behind)}


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds covered by the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
