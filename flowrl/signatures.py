"""What a class can be told when it is made, read from its source: importing torch for that would take seconds."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from flowrl.errors import nearest

_DEEPEST = 8
"""So many modules may hand a class on, one to the next."""


class UnknownClass(ValueError):
    """No such module, or no such class in it; `fix` says what there is."""

    def __init__(self, fact: str, fix: str) -> None:
        super().__init__(fact)
        self.fix = fix


@dataclass(frozen=True)
class Signature:
    """What is known of a class."""

    names: tuple[str, ...]
    """Arguments that it is made with, in their order."""
    takes_any: bool
    """It has `**arguments` too."""
    root: str | None = None
    """The class that it is derived from in the end, perhaps itself; None where only importing it would tell."""
    required: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Arguments that a call of each of its methods cannot leave out."""


def signature_of(name: str) -> Signature | None:
    """What is known of `pkg.module:Class`; None where only importing it would tell. Raises `UnknownClass`."""
    module, _, cls = name.rpartition(":")
    try:
        return _signature(list(_lineage(module, cls)))
    except (OSError, SyntaxError, ImportError):
        return None


def _signature(lineage: list[ast.ClassDef | None]) -> Signature | None:
    """That of a class, from its own definition to the last one that could be read."""
    known = [node for node in lineage if node is not None]
    methods: dict[str, ast.arguments] = {}
    for node in known:
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                methods.setdefault(member.name, member.args)
    made = methods.get("__init__")
    if made is None:
        return None
    names = tuple(one.arg for one in [*made.posonlyargs, *made.args, *made.kwonlyargs][1:])
    root = known[-1].name if len(known) == len(lineage) else None
    return Signature(names, made.kwarg is not None, root, {name: _required(args) for name, args in methods.items()})


def _required(arguments: ast.arguments) -> tuple[str, ...]:
    """Arguments without a default, but the first, which is the object."""
    placed = [*arguments.posonlyargs, *arguments.args]
    bare = placed[1 : len(placed) - len(arguments.defaults)]
    keyed = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return tuple(one.arg for one in [*bare, *(one for one, default in keyed if default is None)])


def _lineage(module: str, name: str) -> Iterator[ast.ClassDef | None]:
    """A class, the one that it is derived from, and so on; ends with None where only importing would tell more."""
    for _ in range(_DEEPEST):
        found = _definition(module, name, 0)
        yield found and found[0]
        if found is None or not found[0].bases:
            return
        (base, *others), module = found[0].bases, found[1]
        if others or not isinstance(base, ast.Name):
            break
        name = base.id
    yield None


def _definition(module: str, name: str, depth: int) -> tuple[ast.ClassDef, str] | None:
    """Where a class is defined, and the module of that. Raises `UnknownClass`."""
    path = _source(module)
    if path is None or depth > _DEEPEST:
        return None
    body = list(_statements(_tree(path)))
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, module
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return _definition(_origin(module, path, node), alias.name, depth + 1)
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    imported = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assigned = {one.id for node in body for one in ast.walk(node) if isinstance(one, ast.Name)}
    if {name, "__getattr__", "*"} & (defined | imported | assigned):
        return None
    raise UnknownClass(
        f"module '{module}' has no class '{name}'", nearest(name, defined | imported) or "it has none at all"
    )


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """What a module does when it is imported, that inside its `if` and `try` included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)


def _source(module: str) -> Path | None:
    """The file of a module; None where that is no text. Raises `UnknownClass`."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise UnknownClass(f"there is no module '{top}'", "install it, or start where it lies")
    folders, found = [Path(folder) for folder in spec.submodule_search_locations or ()], spec.origin
    for depth, part in enumerate(inner):
        places = [folder / part for folder in folders]
        files = [file for place in places for file in (place / "__init__.py", Path(f"{place}.py")) if file.is_file()]
        if not files and any(place.is_dir() or _is_compiled(place) for place in places):
            return None
        if not files:
            names = {file.stem for folder in folders for file in folder.glob("[A-Za-z]*")}
            name = ".".join([top, *inner[: depth + 1]])
            raise UnknownClass(f"there is no module '{name}'", nearest(part, names) or "it is none of a package")
        folders, found = [files[0].with_suffix("") if files[0].stem == part else files[0].parent], str(files[0])
    return Path(found) if found is not None and found.endswith(".py") else None


def _is_compiled(place: Path) -> bool:
    return any(Path(f"{place}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def _origin(module: str, path: Path, node: ast.ImportFrom) -> str:
    """The full name of the module that a `from ... import` names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    package = parts[: len(parts) - node.level + (path.name == "__init__.py")]
    return ".".join([*package, *([node.module] if node.module else [])])


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
