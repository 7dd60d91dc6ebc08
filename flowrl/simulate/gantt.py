"""Who works when: the same bars in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from flowrl.graph.plan import Plan
from flowrl.simulate.run import Outcome

STEPS = 3
"""Drawn, after the warm-up."""
WORKERS = 4
"""Drawn of each pool; the others do the same."""
FEWEST = 20
"""Cells of a line, however long the names beside it are."""
NOTHING, STEP_END = "·", "│"


@dataclass(frozen=True)
class Bar:
    """A node on a worker; seconds since the begin of the chart."""

    node: str
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Chart:
    """A few steps of a run."""

    title: str
    first_step: int
    seconds: float
    step_ends: tuple[float, ...]
    workers: Mapping[str, Sequence[Bar]]
    """By worker, its bars in order."""
    left_out: int
    """Workers that are not drawn."""


def chart(outcome: Outcome) -> Chart:
    """Some steps after the warm-up."""
    first = outcome.warm_up
    ends = outcome.ends[first : first + STEPS]
    start = outcome.window[0]
    workers: dict[str, list[Bar]] = {
        f"{name}/{rank}": [] for name, pool in outcome.plan.pools.items() for rank in range(min(pool.workers, WORKERS))
    }
    for span in outcome.spans:
        if span.worker in workers and span.start < ends[-1] and span.end > start:
            bar = Bar(span.node, span.step, max(span.start, start) - start, min(span.end, ends[-1]) - start)
            workers[span.worker].append(bar)
    num_workers = sum(pool.workers for pool in outcome.plan.pools.values())
    return Chart(
        outcome.plan.document.schedule.mode, first + 1, ends[-1] - start, tuple(end - start for end in ends), workers,
        num_workers - len(workers),
    )  # fmt: skip


def letters(plan: Plan) -> dict[str, str]:
    """A letter for each node: the first of its name that no other one has."""
    found: dict[str, str] = {}
    for name in plan.graph.order:
        choice = (letter for letter in (*name.upper(), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789") if letter.isalnum())
        found[name] = next((letter for letter in choice if letter not in found.values()), "?")
    return found


def as_text(drawn: Chart, names: Mapping[str, str], width: int) -> Iterator[str]:
    """A line for each worker; a cell has the letter of the node that took most of it, if the worker did most of it."""
    label = max(map(len, drawn.workers))
    num_cells = max(width - label - 2, FEWEST)
    cell = drawn.seconds / num_cells
    ends = {min(int(end / cell), num_cells - 1) for end in drawn.step_ends[:-1]}
    for worker, bars in drawn.workers.items():
        cells = "".join(_cells(bars, cell, num_cells, ends, names))
        yield f"{worker:<{label}}  {cells}"
    scale = f"0{f'{drawn.seconds:.3g} s':>{num_cells - 1}}"
    yield f"{'':<{label}}  {scale}"


def _cells(
    bars: Sequence[Bar], cell: float, num_cells: int, ends: Iterable[int], names: Mapping[str, str]
) -> Iterator[str]:
    for number in range(num_cells):
        start, end = number * cell, (number + 1) * cell
        seconds: dict[str, float] = {}
        for bar in bars:
            if bar.start < end and bar.end > start:
                seconds[bar.node] = seconds.get(bar.node, 0.0) + min(bar.end, end) - max(bar.start, start)
        most = max(seconds, key=seconds.__getitem__, default="")
        empty = STEP_END if number in ends else NOTHING
        yield names[most] if sum(seconds.values()) >= cell / 2 else empty


def merged(bars: Iterable[Bar], gap: float) -> Iterator[Bar]:
    """Bars of one node that are next to each other as one, so that thousands of them can be drawn."""
    for (node, step), same in groupby(bars, key=lambda bar: (bar.node, bar.step)):
        current: Bar | None = None
        for bar in same:
            if current is not None and bar.start - current.end <= gap:
                current = Bar(node, step, current.start, max(current.end, bar.end))
                continue
            if current is not None:
                yield current
            current = bar
        if current is not None:
            yield current
