"""YAML text to a `Tree`, with every mistake in it as a `Problem`.

PyYAML's C composer gives nodes with marks; values are resolved here by the rules of YAML 1.2 (`flowrl.spec.scalars`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel

from flowrl.errors import Place, Problem, nearest
from flowrl.spec import codes
from flowrl.spec.scalars import MOST_BITS, Scalar, is_date, resolve
from flowrl.spec.tree import Entry, Path_, Source, Span, Tree, dotted

# Far above any pipeline; a recursive or exploding alias ends here.
MAX_VALUES, MAX_DEPTH = 200_000, 60

_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_TAG = re.compile(r"(?:&\S+\s+)?(!\S*)")
_HINTS = {
    "mapping values are not allowed": "check the indentation of this line, and put a value that holds ': ' in quotes",
    "cannot start any token": "put the value in quotes",
    "did not find expected key": "check the indentation of this line, and that brackets open and close in pairs",
    "did not find expected ',' or": "close the bracket, or put a comma between two items",
    "unexpected end of stream": "close the quote",
    "unknown escape": "write \\\\ for a backslash, or use single quotes",
    "undefined alias": "give the anchor (&name) before the alias, or put a value that begins with * in quotes",
    "found another document": "keep one document in a file; a variant in a file of its own `extends:` the first",
}


class Loaded(NamedTuple):
    """A tree, unless the text was past reading, and the problems found in it."""

    tree: Tree | None
    problems: list[Problem]


class _TooLarge(Exception):
    """Aliases unfold without end."""


SHIPPED = Path(__file__).parents[1] / "pipelines"


def shipped_pipelines() -> list[str]:
    """Names of the pipelines that come with flowrl."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def found_file(path: Path) -> Path:
    """The file itself, or the shipped pipeline of that name where there is no such file: `grpo_sync`."""
    name = path.name
    return SHIPPED / f"{name}.yaml" if not path.is_file() and name in shipped_pipelines() else path


def load_file(path: Path, shown: str, layer: int = 0) -> Loaded:
    """The file at `path`, which the user calls `shown`; its top level must be a mapping."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        fact = f"'{shown}' is not UTF-8 text: {error.reason} at byte {error.start}"
        return Loaded(None, [Problem(codes.UNREADABLE, Place(shown), fact, "save the file as UTF-8")])
    except OSError as error:
        return Loaded(None, [Problem(codes.UNREADABLE, Place(shown), *unreadable(path, shown, error))])
    source = Source(shown, text.splitlines(), path.parent, layer)
    tree, problems = load_text(text, source)
    if tree is not None and not isinstance(tree.value, dict):
        what = "empty" if tree.value is None else "a list" if isinstance(tree.value, tuple) else "a single value"
        fact = f"the document is {what}, not a mapping of keys to values"
        problems.append(Problem(codes.SYNTAX, tree.span.place(), fact, "begin with `flowrl: 1` and `name: ...`"))
        tree = None
    return Loaded(tree, problems)


def _may_be_meant(other: Path, path: Path) -> bool:
    return other.suffix == path.suffix and other != path and other.is_file()


def unreadable(path: Path, shown: str, error: OSError) -> tuple[str, str]:
    """Fact and fix for a file that cannot be read."""
    try:
        siblings = [other.name for other in path.parent.iterdir() if _may_be_meant(other, path)]
    except OSError:
        siblings = []
    siblings += shipped_pipelines() if path.suffix in ("", ".yaml", ".yml") else []
    return f"cannot read '{shown}': {error.strerror or error}", nearest(path.name, siblings)


def load_text(text: str, source: Source) -> Loaded:
    """YAML text of any kind; lines of `source` are those of the text."""
    try:
        node = yaml.compose(text, Loader=yaml.CBaseLoader)
    except yaml.MarkedYAMLError as error:
        return Loaded(None, [_syntax_problem(error, source)])
    except yaml.reader.ReaderError as error:
        # libyaml counts bytes.
        position = len(text.encode()[: error.position].decode(errors="ignore"))
        return Loaded(None, [_character_problem(text, position, source)])
    except UnicodeEncodeError as error:
        return Loaded(None, [_character_problem(text, error.start, source)])
    if node is None:
        return Loaded(Tree(None, Span(source)), [])
    builder = _Builder(source)
    try:
        return Loaded(builder.tree(node, ()), builder.problems)
    except _TooLarge:
        return Loaded(None, [_too_large(Span(source), "an alias")])


def _too_large(span: Span, what: str) -> Problem:
    fact = f"the document unfolds to more than {MAX_VALUES} values or {MAX_DEPTH} levels: {what} holds itself?"
    return Problem(codes.REFUSED_YAML, span.place(), fact, "write the values out")


def _character_problem(text: str, position: int, source: Source) -> Problem:
    before = text[:position]
    span = Span(source, before.count("\n") + 1, position - before.rfind("\n"))
    fact = f"the character U+{ord(text[position]):04X} is not allowed in YAML"
    return Problem(codes.SYNTAX, span.place(), fact, "remove it, or write it as an escape in quotes")


def _syntax_problem(error: Any, source: Source) -> Problem:
    mark, fact = error.problem_mark, str(error.problem)
    at_end = mark.line >= len(source.lines) or "end of stream" in fact
    if at_end and error.context_mark is not None:
        mark, fact = error.context_mark, f"{error.context}: {fact}"
    elif error.context_mark is not None and error.context_mark.line != mark.line and "flow" in str(error.context):
        fact = f"{error.context} that opens in line {error.context_mark.line + 1}: {fact}"
    span = Span(source, mark.line + 1, mark.column + 1)
    line = span.place().text
    fact = fact.removeprefix("but ")
    fix = next((hint for start, hint in _HINTS.items() if start in fact), "")
    if line[mark.column : mark.column + 1] == "\t":
        fact, fix = "a tab cannot be used for indentation", "indent with spaces"
    return Problem(codes.SYNTAX, span.place(), fact, fix)


class _Builder:
    """Turns nodes of the YAML library into trees, gathering problems."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.problems: list[Problem] = []
        self.num_values = 0

    def tree(self, node: Any, path: Path_) -> Tree:
        self.num_values += 1
        if self.num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise _TooLarge
        span = self.span(node)
        kind = self.tag(node, span)
        if kind:
            fix = f'write "{node.value}"' if kind == "!!str" else "remove the tag; the type follows from the value"
            self.refuse(span, path, f"the tag {kind} is not supported", fix)
        if isinstance(node, yaml.MappingNode):
            return Tree(self.mapping(node, path), span)
        if isinstance(node, yaml.SequenceNode):
            return Tree(tuple(self.tree(item, (*path, number)) for number, item in enumerate(node.value)), span)
        if node.style in _QUOTED:
            return Tree(node.value, span)
        if is_date(node.value):
            self.refuse(span, path, f"{node.value} is a date, which flowrl does not use", f'write "{node.value}"')
            return Tree(node.value, span)
        return Tree(resolve(node.value), span)

    def mapping(self, node: Any, path: Path_) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}
        for key, value in node.value:
            span = self.span(key)
            name = self.name(key, span, path)
            if name is None:
                continue
            if name in entries:
                first = entries[name].key.line
                where = (*path, name)
                fact = f"the key '{name}' stands twice in {dotted(path) or 'the document'}, first in line {first}"
                problem = Problem(codes.REPEATED_KEY, span.place(where), fact, "remove or rename one of the two")
                self.problems.append(problem)
                continue
            entries[name] = Entry(span, self.tree(value, (*path, name)))
        return entries

    def name(self, key: Any, span: Span, path: Path_) -> str | None:
        """The key as a string, or None after reporting a key that cannot be one."""
        if not isinstance(key, yaml.ScalarNode):
            self.refuse(span, path, "a list or a mapping cannot be a key", "use a string as the key")
            return None
        value = resolve(key.value) if key.style not in _QUOTED else key.value
        if key.value == "<<" and key.style not in _QUOTED:
            self.refuse(span, path, "the merge key `<<` is not supported", "write the keys out, or use `extends:`")
            return None
        if not isinstance(value, str) or key.tag not in _PLAIN_TAGS or (is_date(value) and key.style not in _QUOTED):
            self.refuse(span, path, f"the key {key.value or 'null'} is not a string", f'write "{key.value}"')
            return None
        return value

    def tag(self, node: Any, span: Span) -> str:
        """The tag as the user wrote it; empty where there is none."""
        if node.tag not in _PLAIN_TAGS:
            return str(node.tag.replace("tag:yaml.org,2002:", "!!"))
        # `!!str 3` is told from 3 by its text alone.
        line = self.source.lines[span.line - 1] if span.line <= len(self.source.lines) else ""
        match = _TAG.match(line, span.column - 1) if line[span.column - 1 : span.column] in ("!", "&") else None
        return match[1] if match else ""

    def span(self, node: Any) -> Span:
        start, end = node.start_mark, node.end_mark
        line = self.source.lines[start.line] if start.line < len(self.source.lines) else ""
        stop = end.column if end.line == start.line else len(line.rstrip())
        return Span(self.source, start.line + 1, start.column + 1, max(stop - start.column, 1))

    def refuse(self, span: Span, path: Path_, fact: str, fix: str) -> None:
        self.problems.append(Problem(codes.REFUSED_YAML, span.place(path), fact, fix))


_QUOTED = frozenset("'\"|>")


def from_python(value: Any, span: Span, path: Path_ = ()) -> Loaded:
    """The same tree from dicts and lists of Python, for the Python API; all values stand at `span`."""
    problems: list[Problem] = []
    num_values = 0

    def build(value: Any, path: Path_) -> Tree:
        nonlocal num_values
        num_values += 1
        if num_values > MAX_VALUES or len(path) > MAX_DEPTH:
            raise _TooLarge
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_unset=True)
        if isinstance(value, Mapping):
            wrong = [key for key in value if not isinstance(key, str)]
            problems.extend(
                Problem(codes.REFUSED_YAML, span.place(path), f"the key {key!r} is not a string") for key in wrong
            )
            parts = {str.__str__(key): item for key, item in value.items() if isinstance(key, str)}
            return Tree({name: Entry(span, build(item, (*path, name))) for name, item in parts.items()}, span)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview, range)):
            return Tree(tuple(build(item, (*path, number)) for number, item in enumerate(value)), span)
        scalar = _scalar(value)
        if scalar is not None or value is None:
            return Tree(scalar, span)
        kind = type(value).__name__
        fact = f"{dotted(path) or 'the document'} is of type {kind}, which YAML has no form for"
        fix = "give a string, a number, a boolean, None, a list or a mapping"
        problems.append(Problem(codes.REFUSED_YAML, span.place(path), fact, fix))
        return Tree(f"a {kind}", span)

    try:
        return Loaded(build(value, path), problems)
    except _TooLarge:
        return Loaded(None, [_too_large(span, "a value")])


def _scalar(value: Any) -> Scalar:
    """A value of Python as a plain scalar, paths, enumerations and numpy's numbers included; None where it is none."""
    if isinstance(value, Enum):
        value = value.value
    elif type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, (bool, type(None))):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if value.bit_length() < MOST_BITS else None
    return float(value) if isinstance(value, float) else None
