"""A user's own file: one JSON object per line, its columns declared from the first lines.

`check` reads the first 100 rows and `load` all of them; every bad line is named with its number, ten at a time.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from pydantic import Field

from flowrl.data.base import BAD_DATA, DataSet, Row
from flowrl.errors import PipelineError, Place, Problem, nearest
from flowrl.fields import Dtype, FieldType

NUM_FIRST_ROWS, NUM_REPORTED = 100, 10
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")

_ARTICLES: dict[Dtype, str] = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string", "json": "JSON",
}  # fmt: skip


class _Line(NamedTuple):
    number: int
    text: str
    row: Row
    fault: str


class Jsonl(DataSet):
    """Rows from a JSON Lines file."""

    type: Literal["jsonl"] = "jsonl"
    """Kind of data set."""
    path: str = Field(min_length=1)
    """The file, relative to the YAML file that names it."""

    def columns(self) -> dict[str, FieldType]:
        """Columns of the first rows; none if the file cannot be read."""
        try:
            lines = list(itertools.islice(self._lines(), NUM_FIRST_ROWS))
        except OSError:
            return {}
        return {name: FieldType("Prompt", dtype) for name, dtype in _declare(lines).items()}

    def problems(
        self, place: Callable[[str], Place], num_needed: int = 1, lower: str = "batch.prompts"
    ) -> list[Problem]:
        """A missing file, bad lines among the first, too few rows for a batch."""
        try:
            lines = list(itertools.islice(self._lines(), min(max(num_needed, NUM_FIRST_ROWS), sys.maxsize)))
        except OSError as error:
            path = Path(self.path)
            siblings = [other.name for other in path.parent.glob("*.jsonl")] if error.errno == errno.ENOENT else []
            fact = f"cannot read '{self.path}': {error.strerror or error}"
            fix = nearest(path.name, siblings) or "path: a JSONL file, relative to the YAML file that names it"
            return [Problem(BAD_DATA, place("path"), fact, fix)]
        found = self._bad_lines(lines[:NUM_FIRST_ROWS], _declare(lines[:NUM_FIRST_ROWS]))
        if not found and len(lines) < num_needed:
            fact = f"{num_needed} prompts are needed at once, but '{self.path}' has {len(lines)}"
            return [Problem(BAD_DATA, place("path"), fact, f"add rows, or lower {lower}")]
        return found

    def load(self) -> list[Row]:
        """All rows, every column present in each. Raises `PipelineError` with the first ten bad lines."""
        try:
            lines = list(self._lines())
        except OSError as error:
            fact = f"cannot read '{self.path}': {error.strerror or error}"
            raise PipelineError([Problem(BAD_DATA, Place(self.path), fact)]) from error
        declared = _declare(lines[:NUM_FIRST_ROWS])
        found = self._bad_lines(lines, declared)
        if found or not lines:
            raise PipelineError(found or [Problem(BAD_DATA, Place(self.path), f"'{self.path}' has no rows")])
        return [{name: _stored(line.row.get(name), dtype) for name, dtype in declared.items()} for line in lines]

    def fingerprint(self) -> str:
        """Of the bytes of the file, wherever it lies."""
        with open(self.path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]

    def _lines(self) -> Iterator[_Line]:
        """Every line that is not blank. Raises `OSError`."""
        if "\0" in self.path:
            raise OSError(errno.EINVAL, "no path holds the character NUL")
        with open(self.path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                line = _parse(number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
                if line.text.strip() or line.fault:
                    yield line

    def _bad_lines(self, lines: list[_Line], declared: dict[str, Dtype]) -> list[Problem]:
        bad = ((line, line.fault or _misfit(line.row, declared)) for line in lines)
        first = list(itertools.islice(((line, fault) for line, fault in bad if fault), NUM_REPORTED))
        places = [Place(self.path, line.number, 1, max(len(line.text), 1), line.text[:160]) for line, _ in first]
        fix = "one JSON object a line, with the same columns in all of them"
        return [
            Problem(BAD_DATA, place, f"bad line: {fault}", fix) for place, (_, fault) in zip(places, first, strict=True)
        ]


def _parse(number: int, raw: bytes) -> _Line:
    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
    if not text.strip():
        return _Line(number, text, {}, "")
    try:
        raw.decode("utf-8")
        row = json.loads(text, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        return _Line(number, text, {}, f"not UTF-8 text at byte {error.start}")
    except json.JSONDecodeError as error:
        return _Line(number, text, {}, f"not JSON: {error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return _Line(number, text, {}, f"not JSON: {error}")
    if not isinstance(row, dict):
        return _Line(number, text, {}, "not an object of columns and values")
    return _Line(number, text, row, "")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number; write null for a missing one")


def _kind(value: Any) -> Dtype:
    for dtype, kind in (("bool", bool), ("int", int), ("float", float), ("str", str)):
        if isinstance(value, kind):
            return dtype  # type: ignore[return-value]
    return "json"


def _declare(lines: list[_Line]) -> dict[str, Dtype]:
    """Type of every column: that of its first value, but float where whole and other numbers mix."""
    declared: dict[str, Dtype] = {}
    empty: dict[str, Dtype] = {}
    for name, value in itertools.chain.from_iterable(line.row.items() for line in lines):
        if value is None:
            empty[name] = "json"
            continue
        kind = _kind(value)
        if declared.setdefault(name, kind) == "int" and kind == "float":
            declared[name] = "float"
    return {**empty, **declared}


def _misfit(row: Row, declared: dict[str, Dtype]) -> str:
    """What is wrong with a row, or nothing."""
    for name, dtype in declared.items():
        value = row.get(name)
        if dtype == "str" and isinstance(value, str) and _HALF_CHARACTER.search(value):
            return f"'{name}' is {_shown(value)}, which holds half of a character"
        if dtype == "json" or (value is None and dtype == "float"):
            continue
        if name not in row:
            return f"the column '{name}' is missing"
        if not _is_a(value, dtype):
            return f"'{name}' is {_shown(value)}, but {_ARTICLES[dtype]} in the rows before"
    extra = next((name for name in row if name not in declared), None)
    return f"the column '{extra}' is not in the first {NUM_FIRST_ROWS} rows" if extra is not None else ""


def _is_a(value: Any, dtype: Dtype) -> bool:
    kind = _kind(value)
    if kind == "int":
        return dtype in ("int", "float") and -(2**63) <= value < 2**63
    if kind == "str":
        # JSON may hold half of a character (\ud800), which cannot be stored as text.
        return dtype == "str" and _HALF_CHARACTER.search(value) is None
    return kind == dtype


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _stored(value: Any, dtype: Dtype) -> Any:
    return float(value) if dtype == "float" and value is not None else value
