"""Data sets that are read row by row: which columns are taken, under which names, of which types.

`check` looks at the first 100 rows, a load at all of them; every bad row is named with its number, ten at a time.
"""

from __future__ import annotations

import itertools
import re
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

from pydantic import Field, model_validator

from flowrl.data.base import BAD_DATA, DataFault, DataSet, Placed, Text, raised
from flowrl.data.rows import Row, Rows, Streamed
from flowrl.data.values import DECLARED, Wrong, declare, misfit, shown, stored
from flowrl.errors import PipelineError, Problem, nearest
from flowrl.fields import Dtype, FieldType
from flowrl.model import SettingError

T = TypeVar("T")
NUM_FIRST_ROWS, NUM_REPORTED = 100, 10


class Line(NamedTuple):
    """A row as it was read."""

    number: int
    """From 1."""
    row: Row
    wrong: Wrong | None = None
    """Why it is no row."""
    text: str = ""
    """What was written, where that is text."""
    source: str = ""
    """Which of several files it is from."""
    left_out: tuple[str, ...] = ()
    """Columns that were not taken."""


class Opened(NamedTuple):
    """A source of rows that is there."""

    lines: Iterable[Line]
    """The rows in order."""
    types: Mapping[str, Dtype] | None = None
    """Columns and types that it declares; None where the first rows tell."""


class Head(NamedTuple):
    """The first rows, and what follows from them."""

    lines: list[Line]
    types: Mapping[str, Dtype]
    said: str
    """Where the types come from."""


class Table(DataSet):
    """Rows with named columns."""

    columns: dict[Text, Dtype] | None = Field(default=None, min_length=1)
    """Columns to read, with their types (`str`, `int`, `float`, `bool`, `json`); null reads all of them."""
    rename: dict[Text, Text] = Field(default_factory=dict)
    """New names of columns: `{prompt: question}` calls the column `question` by the name `prompt`."""
    extract: dict[Text, str] = Field(default_factory=dict)
    """For a column of text, what to take of it: the first match of this regular expression, or of its first group."""
    limit: int | None = Field(default=None, ge=1)
    """Most rows to read; null reads all."""

    rows_fix: ClassVar[str] = "correct the rows, or read other columns by columns: {NAME: TYPE}"
    """What to do about a row of which no more is known."""

    @model_validator(mode="after")
    def _extracts_can_be_read(self) -> Self:
        for name, pattern in self.extract.items():
            try:
                re.compile(pattern)
            except re.error as error:
                fact = f"'{pattern}' for '{name}' is no regular expression: {error}"
                fix = "put a backslash before a character that stands for itself, such as \\( or \\*"
                raise SettingError("extract", fact, fix) from error
        return self

    @property
    @abstractmethod
    def origin(self) -> str:
        """What to call the source of the rows."""

    @property
    def about(self) -> str:
        """Kind and source; of a file its name, for the folder is another on every machine."""
        return f"{super().about} {self.origin.rpartition('/')[2] if self.origin.startswith('/') else self.origin}"

    @abstractmethod
    def opened(self, checking: bool) -> Opened:
        """The source, which a check reads in a cheap way. Raises `DataFault`, as does reading its lines."""

    @property
    def read_by_check(self) -> bool:
        """Whether a check may read the first rows."""
        return True

    @property
    def window(self) -> int | None:
        """Rows that are shuffled with each other where rows are read in the run; None reads all before it."""
        return None

    def bad_rows(self, bad: Sequence[tuple[Line, Wrong]], place: Placed) -> list[Problem]:
        """What is wrong with rows, at the key that names the source."""
        said = [f"row {line.number} of '{line.source or self.origin}': {wrong.fact}" for line, wrong in bad]
        fix = bad[0][1].fix or self.rows_fix if bad else ""
        return [Problem(BAD_DATA, place(self.source_key), said[0], fix, tuple(said[1:]))] if said else []

    @property
    def source_key(self) -> str:
        """The key that says where the rows are."""
        return "path"

    def field_types(self) -> dict[str, FieldType]:
        """Columns of the declaration or of the first rows; none if they cannot be read."""
        try:
            return {name: FieldType("Prompt", dtype) for name, dtype in self._head.types.items()}
        except DataFault:
            return {}

    def problems(self, place: Placed, num_needed: int = 1, lower: str = "batch.prompts") -> list[Problem]:
        """A source that cannot be read, bad rows among the first, too few rows for a batch."""
        try:
            head = self._head
            found = self._bad(head.lines, head, place)
            if found or not self.read_by_check:
                return found
            num_rows = len(head.lines)
            if num_rows == NUM_FIRST_ROWS < num_needed:
                lines, _ = self._opened(checking=True)
                num_rows = sum(1 for _ in itertools.islice(lines, min(num_needed, sys.maxsize)))
        except DataFault as fault:
            return [fault.problem(place)]
        if num_rows >= num_needed:
            return []
        fact = f"{num_needed} prompts are needed at once, but '{self.origin}' has {num_rows}"
        return [Problem(BAD_DATA, place(self.source_key), fact, f"add rows, or lower {lower}")]

    def rows(self, place: Placed) -> Rows:
        """All rows, every column present in each. Raises `PipelineError` with the first ten bad ones."""
        try:
            lines, types = self._opened(checking=False)
            first = list(itertools.islice(lines, NUM_FIRST_ROWS))
            head = self._head_of(first, types)
            if not first:
                raise DataFault(self.source_key, f"'{self.origin}' has no rows", "give it rows")
            if self.window is not None:
                return Streamed(self._good(itertools.chain(first, lines), head, place), self.window)
            every = [*first, *lines]
        except DataFault as fault:
            raise raised(fault, place) from fault
        if found := self._bad(every, head, place):
            raise PipelineError(found)
        return [stored(line.row, head.types) for line in every]

    def fingerprint(self) -> str:
        """Of the rows and of what is taken of them; of a stream, which may be endless, its first rows."""
        lines = itertools.islice(self._opened(checking=False)[0], self.window)
        return self.digest(*self.taken, *(line.row for line in lines))

    @property
    def taken(self) -> tuple[Any, ...]:
        """The settings that say what is taken of the source."""
        return self.columns, self.rename, self.extract, self.limit

    @cached_property
    def _head(self) -> Head:
        if not self.read_by_check:
            return self._head_of([], None)
        lines, types = self._opened(checking=True)
        return self._head_of(list(itertools.islice(lines, NUM_FIRST_ROWS)), types)

    def _opened(self, checking: bool) -> tuple[Iterator[Line], Mapping[str, Dtype] | None]:
        """The lines that are taken, in their final form, and the types that the source declares."""
        source = self.opened(checking)
        return (self._shaped(line) for line in itertools.islice(source.lines, self.limit)), source.types

    def _shaped(self, line: Line) -> Line:
        """The row with the columns that are asked for, under their new names."""
        if line.wrong or not (self.columns or self.rename or self.extract):
            return line
        wanted = line.row if self.columns is None else self.columns
        taken = {name: line.row[name] for name in wanted if name in line.row}
        line = line._replace(left_out=tuple(name for name in line.row if name not in taken))
        row = self._renamed(taken)
        for name, pattern in self.extract.items():
            if name in row:
                match = re.search(pattern, row[name]) if isinstance(row[name], str) else None
                text = match[min(match.re.groups, 1)] if match else None
                if text is None:
                    fact = f"'{name}' is {shown(row[name])}, in which '{pattern}' finds nothing"
                    fix = f"only text has something to extract: remove '{name}' from extract:"
                    if isinstance(row[name], str):
                        fix = "correct the row, or take a pattern that finds something in every row"
                    return line._replace(wrong=Wrong(fact, fix))
                row[name] = text
        return line._replace(row=row)

    def _head_of(self, lines: list[Line], types: Mapping[str, Dtype] | None) -> Head:
        """The types of the columns after renaming. Raises `DataFault` for a name that no column has."""
        given = self.columns or types
        rows = [line.row for line in lines if not line.wrong]
        known = set(itertools.chain.from_iterable(rows))
        if given is None:
            final = declare(rows)
            known |= {old for new, old in self.rename.items() if new in known}
        else:
            final = self._renamed(given)
            known |= set(given)
        others = set(itertools.chain.from_iterable(line.left_out for line in lines))
        if rows:
            self._look_for_columns(set(itertools.chain.from_iterable(rows)), others)
        self._look_for_strangers(known if rows or given is not None else None, final, others)
        said = "in the rows before" if given is None else DECLARED if self.columns else "in the schema"
        return Head(lines, final, said)

    def _renamed(self, given: Mapping[str, T]) -> dict[str, T]:
        """The values of the columns by their new names. Raises `DataFault` for a name that is taken."""
        names: dict[str, list[str]] = {}
        for new, old in self.rename.items():
            names.setdefault(old, []).append(new)
            if new in given and new not in self.rename.values():
                fix = "columns: {NAME: TYPE} reads only some of the columns"
                raise DataFault(("rename", new), f"'{self.origin}' has a column '{new}' already", fix)
        return {new: value for name, value in given.items() for new in names.get(name, [name])}

    def _look_for_columns(self, there: set[str], others: set[str]) -> None:
        """Columns that are declared, and that none of the first rows has."""
        for name, dtype in (self.columns or {}).items():
            if dtype not in ("float", "json") and not there.intersection(self._renamed({name: dtype})):
                fix = nearest(name, others) or "read another column"
                raise DataFault(("columns", name), f"'{self.origin}' has no column '{name}'", fix)

    def _look_for_strangers(self, known: set[str] | None, types: Mapping[str, Dtype], others: set[str]) -> None:
        """Columns that are to be renamed or cut, and that are not there. `known` is None where nothing is known.

        `others` are there, but are not taken.
        """
        if known is None:
            return
        for new, old in self.rename.items():
            if old not in known:
                fix = f"add {old} to columns:" if old in others else nearest(old, known)
                raise DataFault(("rename", new), f"'{self.origin}' has no column '{old}'", fix)
        for name in self.extract:
            if types.get(name) != "str":
                kind = "is not taken" if name in others else "is not there"
                kind = f"is {types[name]}, not text" if name in types else kind
                fix = self._extract_fix(name, types, others)
                raise DataFault(("extract", name), f"'{self.origin}': the column '{name}' {kind}", fix)

    def _extract_fix(self, name: str, types: Mapping[str, Dtype], others: set[str]) -> str:
        if name in others:
            return f"add {name}: str to columns:"
        if new := next((new for new, old in self.rename.items() if old == name), ""):
            return f"extract goes by the new name: extract: {{{new}: ...}}"
        if name not in types:
            return nearest(name, types)
        return f"columns: {{{name}: str}}, if it is text" if self.columns else f"remove '{name}' from extract:"

    def _bad(self, lines: Iterable[Line], head: Head, place: Placed) -> list[Problem]:
        bad = ((line, wrong) for line in lines if (wrong := self._wrong(line, head)))
        return self.bad_rows(list(itertools.islice(bad, NUM_REPORTED)), place)

    def _wrong(self, line: Line, head: Head) -> Wrong | None:
        wrong = line.wrong or misfit(line.row, head.types, head.said)
        if wrong or self.columns or line.row.keys() <= head.types.keys():
            return wrong
        extra = next(name for name in line.row if name not in head.types)
        fix = "the same columns in every row, or columns: {NAME: TYPE} to read some of them"
        return Wrong(f"the column '{extra}' is not in the first {NUM_FIRST_ROWS} rows", fix)

    def _good(self, lines: Iterable[Line], head: Head, place: Placed) -> Iterator[Row]:
        """The rows of a stream, checked when they are read. Raises `PipelineError`."""
        try:
            for line in lines:
                if wrong := self._wrong(line, head):
                    raise PipelineError(self.bad_rows([(line, wrong)], place))
                yield stored(line.row, head.types)
        except DataFault as fault:
            raise raised(fault, place) from fault
