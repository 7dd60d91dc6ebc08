"""Prompts that a rollout can read: text, or chat messages; whatever their column is called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from flowrl.data.base import BAD_DATA, Loading
from flowrl.data.rows import Row, Rows, Streamed
from flowrl.data.values import bad_prompt, shown
from flowrl.errors import PipelineError, Problem

NUM_REPORTED = 10


def checked(rows: Rows, loading: Loading) -> Rows:
    """The rows, whose prompts are looked at now, or when those of a stream are read. Raises `PipelineError`.

    Rows that are made when somebody asks for them are taken as they come: their task was checked.
    """
    if isinstance(rows, Streamed):
        return Streamed(_each(rows, loading), rows.window) if loading.prompts else rows
    if isinstance(rows, list):
        _refuse([_fault(number, row, loading) for number, row in enumerate(rows, 1)], loading)
    return rows


def _each(rows: Streamed, loading: Loading) -> Iterator[Row]:
    for number, row in enumerate(rows.in_order(), 1):
        _refuse([_fault(number, row, loading)], loading)
        yield row


def _fault(number: int, row: Row, loading: Loading) -> str:
    for column in loading.prompts:
        if fault := bad_prompt(row.get(column)):
            return (
                f"row {number} of {loading.name}: '{column}' is {shown(row.get(column))}, which is no prompt: {fault}"
            )
    return ""


def _refuse(faults: Sequence[str], loading: Loading) -> None:
    if found := list(islice(filter(None, faults), NUM_REPORTED)):
        fix = "correct the rows, or let the rollout read another column: reads: {prompt: COLUMN}"
        raise PipelineError([Problem(BAD_DATA, loading.place("type"), found[0], fix, tuple(found[1:]))])
