"""Which values of a data set name files, so that relative ones can start at the folder of the file that says them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from flowrl.data.hf import LOADERS
from flowrl.spec.tree import Path_, Tree, with_items, with_parts


def with_full_paths(data: Tree) -> Tree:
    """A data set whose files go by absolute paths; the same object where it names none."""
    for path, value in named_files(data):
        data = _replaced(data, path, value)
    return data


def named_files(data: Tree, path: Path_ = ()) -> Iterator[tuple[Path_, Tree]]:
    """The values in a data set, at `path` of the document, that name a file or a folder."""
    parts = {name: entry.tree for name, entry in data.entries.items()}
    kind = parts["type"].value if "type" in parts else None
    for name, source in parts["sources"].entries.items() if "sources" in parts else ():
        yield from named_files(source.tree, (*path, "sources", name))
    if kind == "python":
        call = parts.get("call")
        if call is not None and str(call.value).rpartition(":")[0].endswith(".py"):
            yield (*path, "call"), call
    elif kind == "hf":
        loader = "path" in parts and parts["path"].value in LOADERS
        if "path" in parts and not loader and _is_local(parts["path"]):
            yield (*path, "path"), parts["path"]
        if "data_files" in parts and loader:
            yield from _texts(parts["data_files"], (*path, "data_files"))
    elif "path" in parts:
        yield from _texts(parts["path"], (*path, "path"))


def _is_local(value: Tree) -> bool:
    """Whether it is no id of the hub."""
    text = value.value
    return isinstance(text, str) and (text.startswith(("./", "../", "~/", "/")) or os.path.isdir(_full(value)))


def _texts(value: Tree, path: Path_) -> Iterator[tuple[Path_, Tree]]:
    """A text, or those in a list or a mapping; a URL is no file."""
    if isinstance(value.value, str):
        if value.value and "://" not in value.value:
            yield path, value
    elif isinstance(value.value, tuple):
        for number, item in enumerate(value.value):
            yield from _texts(item, (*path, number))
    else:
        for name, entry in value.entries.items():
            yield from _texts(entry.tree, (*path, name))


def _full(value: Tree) -> str:
    return os.path.normpath(os.path.join(os.path.abspath(value.folder), os.path.expanduser(str(value.value))))


def _replaced(tree: Tree, path: Path_, value: Tree) -> Tree:
    if not path:
        return Tree(_full(value), value.span, value.origin)
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        items = list(tree.value)
        items[first] = _replaced(items[first], rest, value)
        return with_items(tree, items)
    parts = {name: entry.tree for name, entry in tree.entries.items()}
    return with_parts(tree, {**parts, first: _replaced(parts[first], rest, value)})
