"""A document as a small immutable tree in which every key and every value knows where it was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import Place

Path_ = tuple[str | int, ...]
"""Keys and list positions from the top of the document."""


@dataclass(frozen=True)
class Source:
    """One text that values come from: a file, an argument of the command line, or Python."""

    file: str
    """As the user named it."""
    lines: Sequence[str] = ()
    folder: Path = Path()
    """Relative paths written in this source start here."""
    layer: int = 0
    """That of the file which the user named; what it extends lies below, and `--set` above it."""


class Span(NamedTuple):
    """A stretch of one line of a source; line and column from 1."""

    source: Source
    line: int = 1
    column: int = 1
    length: int = 1

    def place(self, path: Sequence[str | int] = ()) -> Place:
        """The same for messages; `path` is the place in the document."""
        text = self.source.lines[self.line - 1] if 0 < self.line <= len(self.source.lines) else ""
        source = self.source
        return Place(source.file, self.line, self.column, self.length, text, dotted(path), source.layer)


class Entry(NamedTuple):
    """What a mapping holds under one key."""

    key: Span
    tree: Tree


@dataclass(frozen=True, slots=True)
class Tree:
    """A value and where it stands: a mapping of entries, a tuple of trees, or a scalar."""

    value: Mapping[str, Entry] | tuple[Tree, ...] | Any
    span: Span
    origin: Span | None = None
    """Where a value that stands for a param was written; relative paths in it start there."""

    @property
    def folder(self) -> Path:
        """Where a relative path in this value starts."""
        return (self.origin or self.span).source.folder

    @property
    def entries(self) -> Mapping[str, Entry]:
        """Entries of a mapping; none for anything else."""
        return self.value if isinstance(self.value, dict) else {}


def dotted(path: Iterable[str | int]) -> str:
    """`nodes.advantage.tags[0]` for a path."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def plain(tree: Tree) -> Any:
    """The tree as dicts, lists and scalars."""
    if isinstance(tree.value, dict):
        return {name: plain(entry.tree) for name, entry in tree.value.items()}
    if isinstance(tree.value, tuple):
        return [plain(item) for item in tree.value]
    return tree.value


def child(tree: Tree, part: str | int) -> tuple[Span, Tree] | None:
    """Key and value of one part of a tree; a list item is its own key."""
    if isinstance(part, str) and part in tree.entries:
        return tree.entries[part]
    if isinstance(tree.value, tuple) and isinstance(part, int) and 0 <= part < len(tree.value):
        return tree.value[part].span, tree.value[part]
    return None


def locate(tree: Tree, path: Iterable[str | int], key: bool = False) -> Span:
    """Span of the value at `path`, or of its key; of its nearest ancestor's key where the path leads nowhere.

    The value of a `$name` stands under `params:`.
    """
    name, here, found = tree.span, tree, True
    for part in path:
        step = child(here, part)
        if step is None:
            found = False
            break
        name, here = step
    return (here.origin or here.span) if found and not key else name


def without_nulls(tree: Tree) -> Tree:
    """The tree without the keys whose value is null: null means left out, so that the default applies."""
    if isinstance(tree.value, tuple):
        return with_items(tree, [without_nulls(item) for item in tree.value])
    entries = tree.entries.items()
    return with_parts(tree, {n: without_nulls(e.tree) for n, e in entries if e.tree.value is not None})


def with_parts(tree: Tree, parts: Mapping[str, Tree]) -> Tree:
    """A mapping with these values under keys of its own; the same object if nothing changes, as for a scalar."""
    entries = tree.entries
    if len(parts) == len(entries) and all(part is entries[name].tree for name, part in parts.items()):
        return tree
    return Tree({name: Entry(entries[name].key, part) for name, part in parts.items()}, tree.span)


def with_items(tree: Tree, items: Sequence[Tree]) -> Tree:
    """A list with these items; the same object if nothing changes."""
    same = all(new is old for new, old in zip(items, tree.value, strict=True))
    return tree if same else Tree(tuple(items), tree.span)
