"""What the tests of data sets share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flowrl.data.base import DataSet, Loading
from flowrl.data.rows import Row
from flowrl.errors import PipelineError, Place, Problem


def place(*keys: str) -> Place:
    """Where a key of the set stands."""
    return Place("p.yaml", 3, path=".".join(keys))


def faults(data: DataSet, num_needed: int = 1) -> list[tuple[str, str]]:
    """Path and fact of every problem that a check finds; all have the code of data."""
    found = data.problems(place, num_needed)
    assert all(problem.code == "FR018" and problem.severity == "error" for problem in found)
    return [(problem.place.path, problem.fact) for problem in found]


def load_faults(data: DataSet) -> list[Problem]:
    """The problems that a load raises."""
    with pytest.raises(PipelineError) as raised:
        data.load(Loading(place=place))
    return list(raised.value.problems)


def types(data: DataSet) -> dict[str, str]:
    """Type of every field, without its axis."""
    assert all(kind.axis == "Prompt" for kind in data.field_types().values())
    return {name: kind.dtype for name, kind in data.field_types().items()}


def by_length(column: str = "prompt") -> Callable[[Sequence[Row]], list[int]]:
    """Counts a token for each character."""

    def lengths(rows: Sequence[Row]) -> list[int]:
        return [len(row[column]) for row in rows]

    return lengths


def listed(rows: Any) -> list[Row]:
    """The rows of a load that are a sequence."""
    return [rows[position] for position in range(len(rows))]
