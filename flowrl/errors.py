"""Mistakes of users as values: what is wrong, where, and how to put it right.

A `Problem` is found before anything starts; all problems of a pipeline are collected and raised together as one
`PipelineError` (exit code 2). A `RunError` is the failure of a started run (exit code 1); it names node, rows, worker.
"""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Place:
    """Where a value stands in what the user wrote."""

    file: str
    """File as the user named it, or `--set` for an override of the command line."""
    line: int = 1
    """From 1."""
    column: int = 1
    """From 1."""
    length: int = 1
    """Characters to underline."""
    text: str = ""
    """The whole source line, for the code frame; empty where there is none."""
    path: str = ""
    """Dotted path of the value in the document, such as `nodes.advantage`."""
    layer: int = field(default=0, compare=False)
    """What is laid over something else has a higher one: `--set` over the file, the file over what it extends."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Problem:
    """One mistake: a stable code, its place, the fact, notes that help, and the fix to make."""

    code: str
    place: Place
    fact: str
    fix: str = ""
    notes: tuple[str, ...] = field(default=())
    severity: Severity = "error"

    def render(self) -> str:
        """The problem as a compiler would print it, with the source line underlined."""
        lines = [f"{self.severity}[{self.code}] {self.place}  " + self.fact.replace("\n", "\n   | ")]
        if self.place.text:
            lines += _frame(self.place)
        lines += [f"   = {note}" for note in self.notes]
        if self.fix:
            lines.append(f"   fix: {self.fix}")
        return "\n".join(lines)

    def as_data(self) -> dict[str, Any]:
        """The problem as plain data for tools; lines and columns count from 1."""
        return {
            "code": self.code,
            "severity": self.severity,
            "file": self.place.file,
            "line": self.place.line,
            "column": self.place.column,
            "length": self.place.length,
            "path": self.place.path,
            "fact": self.fact,
            "notes": list(self.notes),
            "fix": self.fix,
        }

    def as_github(self) -> str:
        """The problem as a workflow command of GitHub Actions, which shows it beside the line."""
        place = self.place
        where = {"file": place.file, "line": place.line, "col": place.column, "endColumn": place.column + place.length}
        if place.file.startswith(("-", "<")):
            where = {}  # an option of the command or Python code: no file of the repository
        keys = ",".join(f"{key}={_escaped(str(value), ':,')}" for key, value in [*where.items(), ("title", self.code)])
        text = "\n".join([self.fact, *self.notes, *[f"fix: {self.fix}"] * bool(self.fix)])
        return f"::{self.severity} {keys}::{_escaped(text)}"


def _frame(place: Place) -> list[str]:
    """The source line with the value underlined; of a long line only what stands around it."""
    start = min(max(place.column - 1, 0), len(place.text))
    stop = min(start + max(place.length, 1), len(place.text))
    first = max(0, start - _FRAME // 4) if len(place.text) > _FRAME else 0
    last = min(len(place.text), first + _FRAME)
    before = "…" * (first > 0) + _expanded(place.text[first:start])
    marked = _expanded(place.text[start : min(stop, last)])
    after = _expanded(place.text[min(stop, last) : last]) + "…" * (last < len(place.text))
    underline = " " * _width(before) + "^" * max(_width(marked), 1)
    return [f"{place.line:>5} | {before}{marked}{after}", f"      | {underline}"]


_FRAME = 160
"""Characters of a source line that are shown."""


def _expanded(text: str) -> str:
    """A tab as four spaces, so that it is as wide below as above."""
    return text.replace("\t", "    ")


def _width(text: str) -> int:
    """Columns that a text takes on a terminal: characters of East Asia are two wide, combining ones have no width."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(letter) in ("W", "F") for letter in text)
    return len(text) + wide - sum(unicodedata.category(letter) in ("Mn", "Me", "Cf") for letter in text)


def _escaped(text: str, more: str = "") -> str:
    """As workflow commands want it: percent signs, line ends, and in properties colons and commas too."""
    return "".join(f"%{ord(letter):02X}" if letter in "%\r\n" + more else letter for letter in text)


class PipelineError(Exception):
    """The pipeline is wrong: carries every problem found."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a PipelineError needs at least one problem"
        self.problems = tuple(problems)
        super().__init__("\n\n".join(problem.render() for problem in self.problems))


class NodeDefinitionError(TypeError):
    """A node class breaks the rules of `flowrl.Node`; raised when the class is made, that is, at import."""


class RunError(Exception):
    """A started run failed: what happened, in which node, on which rows, on which worker."""

    def __init__(
        self, fact: str, *, node: str = "", rows: Sequence[str] = (), worker: str = "", details: str = ""
    ) -> None:
        self.fact, self.node, self.rows, self.worker, self.details = fact, node, tuple(rows), worker, details
        where = [f"node {node}"] * bool(node) + [f"worker {worker}"] * bool(worker)
        if rows:
            where.append(f"rows {', '.join(rows[:5])}" + (f" and {len(rows) - 5} more" if len(rows) > 5 else ""))
        super().__init__(f"{fact} ({'; '.join(where)})" if where else fact)


def closest(name: str, known: Iterable[str]) -> str:
    """The known name that a misspelt one stands for, whatever its case; empty when nothing is near."""
    folded = {one.casefold(): one for one in known}
    return "".join(folded[one] for one in difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6))


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for a misspelt name, or the list of known names when nothing is near."""
    names = sorted(known)
    if close := closest(name, names):
        return f"did you mean '{close}'?"
    if not names:
        return ""
    return "known: " + ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
