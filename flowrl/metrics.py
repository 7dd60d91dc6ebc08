"""What nodes report beside their outputs: metrics with a declared reduction, and rows that failed."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Literal

Reduce = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True)
class Metric:
    """A value in the making: parts from micro-batches, blocks and ranks are merged by the declared reduction."""

    name: str
    total: float
    weight: float
    reduce: Reduce

    def merge(self, other: Metric) -> Metric:
        """This part and a later one together."""
        if other.reduce != self.reduce:
            raise ValueError(
                f"metric '{self.name}' is reduced by {self.reduce} in one place and {other.reduce} in another"
            )
        if self.reduce in ("max", "min"):
            return replace(self, total=(max if self.reduce == "max" else min)(self.total, other.total))
        if self.reduce == "last":
            return other
        return replace(self, total=self.total + other.total, weight=self.weight + other.weight)

    @property
    def value(self) -> float:
        """The reduced value; NaN for a mean over nothing."""
        if self.reduce == "mean":
            return self.total / self.weight if self.weight else float("nan")
        return self.total


@dataclass(frozen=True)
class Failure:
    """A row, or a whole call, that went wrong: an exception is a value, never a score."""

    rows: tuple[str, ...]
    """Names such as `u17_0_0`; empty if it concerns no row in particular."""
    error: str
    """One line: type and message."""
    traceback: str = ""


@dataclass
class Report:
    """What one call of a node has reported."""

    metrics: dict[str, Metric] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    failed: bool = False
    """The call as a whole went wrong."""


_report: ContextVar[Report | None] = ContextVar("flowrl_report", default=None)


def metric(name: str, total: float, weight: float = 1.0, reduce: Reduce = "mean") -> None:
    """Report a metric from inside `Node.run`; does nothing outside the engine.

    For `mean`, `total` is the sum of the values and `weight` their number, so that micro-batches, blocks and ranks of
    any size add up to the true mean. For `sum`, `max`, `min` and `last`, `total` is the value.
    """
    if _report.get() is not None:
        replay(Report({name: Metric(name, float(total), float(weight), reduce)}))


def failure(rows: Iterable[str], error: BaseException) -> None:
    """Report rows that could not be worked on, from inside `Node.run`; does nothing outside the engine."""
    report = _report.get()
    if report is not None:
        report.failures.append(failure_of(rows, error))


def replay(reported: Report) -> None:
    """Report again, in this context, what another process or call has reported."""
    report = _report.get()
    if report is not None:
        for part in reported.metrics.values():
            report.metrics[part.name] = report.metrics[part.name].merge(part) if part.name in report.metrics else part
        report.failures.extend(reported.failures)


def failure_of(rows: Iterable[str], error: BaseException) -> Failure:
    """The failure that an exception means for these rows."""
    text = "".join(traceback.format_exception(error))
    try:
        said = str(error)
    except Exception as worse:
        said = f"its message cannot be shown ({type(worse).__name__})"
    return Failure(tuple(rows), f"{type(error).__name__}: {said}", text)


@contextmanager
def collect(report: Report | None = None) -> Iterator[Report]:
    """Collect what is reported inside the block, in a new report or on top of one; for the engine and for tests."""
    report = report or Report()
    token = _report.set(report)
    try:
        yield report
    finally:
        _report.reset(token)


def merge(groups: Iterable[Iterable[Metric]]) -> dict[str, Metric]:
    """Parts of several blocks or ranks as one metric each."""
    merged: dict[str, Metric] = {}
    for group in groups:
        for part in group:
            merged[part.name] = merged[part.name].merge(part) if part.name in merged else part
    return merged
