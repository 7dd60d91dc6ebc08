"""From a file, overlays and all, to a `Document`, with every problem found on the way.

One pass after the other, each of which goes on with what the one before could use: load, extend, `--set`, `$params`,
validate, look at the data files.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import Place, Problem, closest
from flowrl.model_files import GGUF, is_inline
from flowrl.spec import codes
from flowrl.spec.data_paths import with_full_paths
from flowrl.spec.document import Document, homes
from flowrl.spec.load import Loaded, found_file, from_python, load_file
from flowrl.spec.merge import incomplete, merge, overlay, with_bases
from flowrl.spec.params import Substitution
from flowrl.spec.tree import Path_, Source, Span, Tree, locate, plain, with_parts, without_nulls
from flowrl.spec.validate import repair

# What takes the place of a required section that is missing, so that the others can still be checked.
_STAND_INS: Mapping[Path_, Any] = {
    ("flowrl",): 1,
    ("name",): "unnamed",
    ("data",): {"train": {"type": "arithmetic"}},
    ("data", "train"): {"type": "arithmetic"},
    ("batch",): {"prompts": 1, "group": 1},
    ("batch", "prompts"): 1,
    ("batch", "group"): 1,
}


@dataclass(frozen=True)
class Reading:
    """What a document says, and what is wrong with it."""

    document: Document | None
    """The document without the values that were refused; None if nothing of it can be used."""
    problems: tuple[Problem, ...]
    """Everything found wrong, in the order of the file."""
    resolved: dict[str, Any]
    """The merged document as plain data, before defaults."""
    broken: frozenset[Path_]
    """Paths of values that were refused or are missing; what follows from them need not be reported."""
    tree: Tree
    """The merged document with a position for every value."""

    def place(self, path: Sequence[str | int], key: bool = False) -> Place:
        """Where the value at `path` was written, or its key; where its nearest ancestor was, if it was not written."""
        return locate(self.tree, path, key).place(path)

    def folder(self, path: Sequence[str | int]) -> Path:
        """Where a relative path in the value at `path` starts: the folder of the file that holds the value."""
        return locate(self.tree, path).source.folder

    def is_broken(self, path: Path_) -> bool:
        """Whether the value at `path`, or one that it is part of, was refused."""
        return any(path[:length] in self.broken for length in range(1, len(path) + 1))


@contextmanager
def without_collection() -> Iterator[None]:
    """Without Python's collector of cyclic garbage.

    A long document is many thousand small objects and no garbage; the collector would look at all of them again and
    again, which takes three times as long as the reading itself.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@without_collection()
def read_document(path: str | Path, sets: Sequence[str] = ()) -> Reading:
    """Read a YAML file, or the shipped pipeline of that name, with the `--set` arguments of the command laid on it."""
    file = found_file(Path(path)) if "/" not in str(path) else Path(path)
    shown = str(path if file == Path(path) else file)
    return _read(load_file(file, shown), shown, file, sets)


def read_value(data: Mapping[str, Any], sets: Sequence[str] = (), folder: str | Path = ".") -> Reading:
    """The same for a document made in Python, whose relative paths start at `folder`."""
    shown = "<python>"
    return _read(from_python(data, Span(Source(shown, (), Path(folder)))), shown, Path(folder) / shown, sets)


def _read(loaded: Loaded, shown: str, path: Path, sets: Sequence[str]) -> Reading:
    tree, problems = with_bases(loaded, {path.resolve()}, [shown])
    if tree is None:
        return Reading(None, tuple(problems), {}, frozenset(), Tree({}, Span(Source(shown))))
    over, more = overlay(sets, tree)
    tree = merge(tree, over) if over is not None else tree
    substitution = Substitution(tree)
    tree = _anchored(without_nulls(substitution.tree))
    resolved = plain(tree)
    misspelt = any(closest(name, {"extends", *Document.model_fields}) == "extends" for name in resolved)
    partly = misspelt or incomplete(problems)

    def place(path: Path_, key: bool = False) -> Place:
        # A key missing at the top has no line to show.
        return locate(tree, path, key).place(path) if path else Place(shown)

    document, wrong, broken = repair(
        Document, resolved, place, known=("extends",), homes=homes(), broken=substitution.broken, stand_ins=_STAND_INS
    )
    problems = [*problems, *more, *substitution.problems, *wrong]
    if partly:
        # Only what a file says can be wrong while a file that it extends is missing, not what it leaves out.
        problems = [problem for problem in problems if problem.code not in (codes.MISSING_KEY, codes.UNKNOWN_PARAM)]
        document = None
    reading = Reading(document, (), resolved, broken, tree)
    problems += _data_problems(reading) if document is not None else []
    return Reading(document, tuple(_in_order(problems, shown)), resolved, broken, tree)


_PATHS = (
    ("models", "path"), ("models", "tokenizer"), ("models", "chat_template"), ("nodes", "use"),
    ("nodes", "call"), ("nodes", "loss"),
)  # fmt: skip
"""Keys of the entries of a section that may name files."""


def _anchored(tree: Tree) -> Tree:
    """The tree with every relative path of a file made absolute, from the folder of the file that says it.

    A document may extend one in another folder, and the resolved document is kept in the run folder.
    """
    sections = {section: entry.tree for section, entry in tree.entries.items()}
    for section, key in _PATHS:
        entries = sections[section].entries.items() if section in sections else ()
        if entries:
            parts = {name: _with_full_path(entry.tree, section, key) for name, entry in entries}
            sections[section] = with_parts(sections[section], parts)
    if "data" in sections:
        sets = {name: with_full_paths(entry.tree) for name, entry in sections["data"].entries.items()}
        sections["data"] = with_parts(sections["data"], sets)
    return with_parts(tree, sections)


def _with_full_path(tree: Tree, section: str, key: str) -> Tree:
    """One data set, model or node; the same object where the value of `key` names no file."""
    entry = tree.entries.get(key)
    value = entry.tree.value if entry is not None else None
    if entry is None or not isinstance(value, str) or not value:
        return tree
    prefix = GGUF if section == "models" and value.startswith(GGUF) else ""
    file = os.path.expanduser(value.removeprefix(prefix))
    full = os.path.normpath(os.path.join(os.path.abspath(entry.tree.folder), file))
    if not prefix and not _names_a_file(section, key, value, full):
        return tree
    parts = {name: entry.tree for name, entry in tree.entries.items()}
    return with_parts(tree, {**parts, key: Tree(prefix + full, entry.tree.span, entry.tree.origin)})


def _names_a_file(section: str, key: str, value: str, full: str) -> bool:
    """A model may be a shipped name or a hub id too, a chat template its own text, a node the name of a class."""
    if section == "nodes":
        return value.rpartition(":")[0].endswith(".py")
    if key == "chat_template":
        return not is_inline(value)
    return value.startswith(("./", "../", "~/")) or value.endswith(".gguf") or os.path.isdir(full)


def _data_problems(reading: Reading) -> list[Problem]:
    """Problems of the data files, of sets that are themselves right."""
    assert reading.document is not None
    found: list[Problem] = []
    for name, data in reading.document.data.items():
        if reading.is_broken(("data", name)):
            continue

        def place(*keys: str, name: str = name) -> Place:
            return reading.place(("data", name, *keys))

        sized = name == "train" and not any(map(reading.is_broken, (("batch", "prompts"), ("schedule",))))
        document = reading.document
        found += data.problems(place, document.prompts_in_flight if sized else 1, document.decides_prompts_in_flight)
    return found


def _in_order(problems: Sequence[Problem], main: str) -> list[Problem]:
    """By position, the main file first; nothing more on a value that YAML itself should not hold."""
    refused = {_spot(problem.place) for problem in problems if problem.code == codes.REFUSED_YAML}
    kept = [p for p in problems if p.code == codes.REFUSED_YAML or _spot(p.place) not in refused]
    return sorted(kept, key=lambda p: (p.place.file != main, p.place.file, p.place.line, p.place.column))


def _spot(place: Place) -> tuple[str, str]:
    """Where a value stands, whatever it is used for; values made in Python stand nowhere."""
    return str(place), "" if place.text else place.path
