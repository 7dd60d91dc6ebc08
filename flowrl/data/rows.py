"""What a data set loads: a list of rows, a stream of them, or a mixture of several of either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

Row = dict[str, Any]


class Streamed:
    """Rows that are read when somebody asks for them, and kept, so that later epochs read nothing again.

    `window` rows are shuffled with each other: the next ones are not known before.
    """

    def __init__(self, rows: Iterable[Row], window: int) -> None:
        self.window = window
        self._source = iter(rows)
        self._rows: list[Row] = []
        self.ended = False

    def __getitem__(self, position: int) -> Row:
        if not self.reaches(position + 1):
            raise IndexError(f"the stream ended after {len(self._rows)} rows")
        return self._rows[position]

    def reaches(self, num_rows: int) -> bool:
        """Whether there are so many rows; reads on until that is known."""
        missing = num_rows - len(self._rows)
        if missing > 0 and not self.ended:
            more = list(islice(self._source, missing))
            self._rows += more
            self.ended = len(more) < missing
        return len(self._rows) >= num_rows

    def in_order(self) -> Iterator[Row]:
        """Every row once, read when it is asked for."""
        position = 0
        while self.reaches(position + 1):
            yield self._rows[position]
            position += 1

    @property
    def num_read(self) -> int:
        """Rows read so far; all of them once the stream has `ended`."""
        return len(self._rows)


Rows: TypeAlias = Sequence[Row] | Streamed
"""The rows of one source."""


@dataclass(frozen=True)
class Part:
    """One source of a mixture."""

    rows: Rows
    weight: float = 1.0
    """Its share of the prompts, relative to the weights of the others."""
    shuffle: bool = True
    name: str = ""
    defaults: Row = field(default_factory=dict)
    """Values of columns that its rows lack."""


@dataclass(frozen=True)
class Mixed:
    """Several sources, of which prompts are taken in turn."""

    parts: tuple[Part, ...]


Loaded: TypeAlias = Rows | Mixed
