"""Mistakes of users as values: what is wrong, where, and how to put it right.

A `Problem` is found before anything starts; all problems of a pipeline are collected and raised together as one
`PipelineError` (exit code 2). A `RunError` is the failure of a started run (exit code 1); it names node, rows, worker.
"""

from __future__ import annotations

import difflib
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
        lines = [f"{self.severity}[{self.code}] {self.place}  {self.fact}"]
        if self.place.text:
            number = f"{self.place.line:>5}"
            start = max(self.place.column - 1, 0)
            width = max(1, min(self.place.length, len(self.place.text) - start))
            lines += [f"{number} | {self.place.text}", f"      | {' ' * start}{'^' * width}"]
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


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for a misspelt name, or the list of known names when nothing is near."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    if not names:
        return ""
    return "known: " + ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
