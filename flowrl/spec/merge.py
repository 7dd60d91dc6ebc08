"""Overlays: `extends: other.yaml` and `--set a.b.c=value`.

Mappings merge, anything else replaces, null removes, and a mapping whose `use`, `type` or `mode` changes is replaced
whole: the settings of one kind mean nothing to another. A merged value keeps the position where it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from flowrl.errors import Place, Problem
from flowrl.spec import codes
from flowrl.spec.load import Loaded, found_file, load_file, load_text, unreadable
from flowrl.spec.scalars import write
from flowrl.spec.tree import Entry, Source, Span, Tree, dotted

KINDS = ("use", "type", "mode")


def merge(base: Tree, over: Tree, inside_params: bool = False) -> Tree:
    """`over` laid on `base`. Names of params are the user's own, so `type` means nothing special in them."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    if not inside_params and _kind_changes(base, over):
        return over
    entries = dict(base.value)
    for name, entry in over.value.items():
        old = entries.get(name)
        if entry.tree.value is None:
            entries.pop(name, None)
        elif old is None:
            entries[name] = entry
        else:
            tree = merge(old.tree, entry.tree, inside_params or name == "params")
            entries[name] = Entry(entry.key if tree is entry.tree else old.key, tree)
    return Tree(entries, base.span)


def _kind_changes(base: Tree, over: Tree) -> bool:
    """The first of use, type, mode that the base has says what it is: a node's parameter may be called `mode`."""
    kind = next((kind for kind in KINDS if kind in base.entries), None)
    if kind is None or kind not in over.entries:
        return False
    before, after = base.entries[kind].tree.value, over.entries[kind].tree.value
    return after is not None and not isinstance(after, (dict, tuple)) and after != before


def with_bases(loaded: Loaded, visited: set[Path], shown: list[str]) -> Loaded:
    """A tree laid over what it extends; `visited` and `shown` are the files on the way to it."""
    tree, problems = loaded
    base = tree.entries.get("extends") if tree is not None else None
    if tree is None or base is None:
        return loaded
    tree = Tree({name: entry for name, entry in tree.entries.items() if name != "extends"}, tree.span)
    if base.tree.value is None:
        return Loaded(tree, problems)
    found = _base_file(base.tree, visited, shown)
    if isinstance(found, Problem):
        return Loaded(tree, [*problems, found])
    below = with_bases(
        load_file(found.path, found.shown, tree.span.source.layer - 1),
        visited | {found.path.resolve()},
        [*shown, found.shown],
    )
    return Loaded(tree if below.tree is None else merge(below.tree, tree), below.problems + problems)


def incomplete(problems: Sequence[Problem]) -> bool:
    """Whether a file of the chain could not be used, so that what is missing says nothing."""
    return any(problem.code in (codes.UNREADABLE, codes.SYNTAX, codes.BAD_EXTENDS) for problem in problems)


class _Base(NamedTuple):
    path: Path
    shown: str


def _base_file(tree: Tree, visited: set[Path], seen: list[str]) -> _Base | Problem:
    place = tree.span.place(("extends",))
    if not isinstance(tree.value, str):
        return Problem(
            codes.BAD_EXTENDS,
            place,
            f"extends must be the name of one file, not {write(tree.value)}",
            "extends: FILE.yaml",
        )
    path = tree.span.source.folder / tree.value
    shown = str(Path(tree.span.source.file).parent / tree.value)
    try:
        found = found_file(path) if "/" not in tree.value else path
        path, shown = found, shown if found == path else str(found)
        path.open("rb").close()
        real = path.resolve()
    except (OSError, ValueError) as error:
        reason = error if isinstance(error, OSError) else OSError(str(error))
        return Problem(codes.BAD_EXTENDS, place, *unreadable(path, shown, reason))
    if real in visited:
        circle = " extends ".join([*seen, shown])
        return Problem(
            codes.BAD_EXTENDS, place, f"files extend each other in a circle: {circle}", "remove one `extends:`"
        )
    return _Base(path, shown)


def overlay(arguments: Sequence[str], base: Tree) -> Loaded:
    """All `--set` arguments as one tree to lay on `base`; later arguments win over earlier ones."""
    span = Span(Source("--set", layer=1))
    tree = Tree({}, span)
    problems: list[Problem] = []
    for argument in arguments:
        one = _parse(argument)
        if isinstance(one, Problem):
            problems.append(one)
            continue
        path, value = one
        if path[0] == "extends":
            fact, fix = "extends cannot be set: it is read from files only", "name the other file, or write it in one"
            problems.append(Problem(codes.BAD_SET, value.span.place(("extends",)), fact, fix))
            continue
        blocked = _blocked(base, path, value.span, argument) or _blocked(tree, path, value.span, argument)
        if blocked is not None:
            problems.append(blocked)
            continue
        tree = _put(tree, path, value)
    return Loaded(tree, problems)


def _parse(argument: str) -> tuple[list[str], Tree] | Problem:
    """Path and value of `a.b.c=value`. The value keeps its column in the argument."""
    key, equals, text = argument.partition("=")
    source = Source("--set", argument.splitlines() or [""], Path.cwd(), layer=1)
    place = Span(source, 1, 1, max(len(argument), 1)).place()
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        fix = "--set batch.prompts=8, for example" if equals or not all(path) else f"--set {key}=VALUE"
        return Problem(codes.BAD_SET, place, f"'{argument}' is not of the form key.of.value=value", fix)
    if not text.strip():
        fix = f"{key}=null removes the value, {key}='\"\"' is an empty string"
        return Problem(codes.BAD_SET, place, f"'{argument}' gives no value", fix)
    tree, problems = load_text(" " * (len(key) + 1) + text, source)
    if problems or tree is None:
        fact = "; ".join(problem.fact for problem in problems)
        where = problems[0].place if problems else place
        return Problem(codes.BAD_SET, where, f"the value of '{key}' cannot be read: {fact}", problems[0].fix)
    return path, tree


def _blocked(tree: Tree, path: Sequence[str], span: Span, argument: str) -> Problem | None:
    """The problem of a path that leads through a list or a scalar."""
    for depth, part in enumerate(path[:-1], start=1):
        entry = tree.entries.get(part)
        if entry is None or entry.tree.value is None:
            return None
        tree = entry.tree
        if not isinstance(tree.value, dict):
            above = dotted(path[:depth])
            place = Place("--set", 1, 1, len(argument.partition("=")[0]), argument, dotted(path))
            fact = f"'{dotted(path)}' cannot be set: {above} is {write(tree.value)}, not a mapping"
            return Problem(codes.BAD_SET, place, fact, f"set {above} as a whole")
    return None


def _put(tree: Tree, path: Sequence[str], value: Tree) -> Tree:
    """The overlay with one more value; `value` may be a mapping, which then merges."""
    source = value.span.source
    for depth in range(len(path), 0, -1):
        column = len(".".join(path[: depth - 1])) + (2 if depth > 1 else 1)
        key = Span(source, 1, column, len(path[depth - 1]))
        value = Tree({path[depth - 1]: Entry(key, value)}, key)
    return _stacked(tree, value)


def _stacked(base: Tree, over: Tree) -> Tree:
    """Like `merge`, but null stays, for it has yet to remove something from the file."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    both = {name: _stacked(base.value[name].tree, over.value[name].tree) for name in over.value if name in base.value}
    new = {name: Entry(entry.key, both.get(name, entry.tree)) for name, entry in over.value.items()}
    return Tree({**base.value, **new}, base.span)
