"""`$name`: a whole value that is replaced by the param of that name. Nothing else is a template; `cost $5` stays."""

from __future__ import annotations

import re

from flowrl.errors import Problem, nearest
from flowrl.spec import codes
from flowrl.spec.tree import Path_, Tree, dotted, with_items, with_parts

REFERENCE = re.compile(r"\$([A-Za-z_]\w*)", re.ASCII)


class Substitution:
    """Replaces references in a document; gathers problems and the paths of values that could not be replaced."""

    def __init__(self, document: Tree) -> None:
        self.problems: list[Problem] = []
        self.broken: set[Path_] = set()
        section = document.entries.get("params")
        params = section.tree if section is not None else Tree(None, document.span)
        self.params = {name: entry for name, entry in params.entries.items() if entry.tree.value is not None}
        self.usable = params.value is None or isinstance(params.value, dict)
        parts = {n: e.tree if n == "params" else self._replace(e.tree, (n,)) for n, e in document.entries.items()}
        self.tree = with_parts(document, parts)
        for name, entry in self.params.items():
            self._check_param(entry.tree, ("params", name))

    def _replace(self, tree: Tree, path: Path_) -> Tree:
        if isinstance(tree.value, dict):
            entries = tree.value.items()
            return with_parts(tree, {name: self._replace(e.tree, (*path, name)) for name, e in entries})
        if isinstance(tree.value, tuple):
            return with_items(tree, [self._replace(item, (*path, n)) for n, item in enumerate(tree.value)])
        match = REFERENCE.fullmatch(tree.value) if isinstance(tree.value, str) else None
        if match is None:
            return tree
        found = self.params.get(match[1])
        if found is not None:
            return Tree(found.tree.value, tree.span, found.tree.span)
        self.broken.add(path)
        if self.usable:
            fix = nearest(match[1], self.params) or f"add it: params: {{{match[1]}: ...}}"
            place = tree.span.place(path)
            self.problems.append(
                Problem(codes.UNKNOWN_PARAM, place, f"params has no '{match[1]}' for ${match[1]}", fix)
            )
        return Tree(None, tree.span)

    def _check_param(self, tree: Tree, path: Path_) -> None:
        for name, entry in tree.entries.items():
            self._check_param(entry.tree, (*path, name))
        for number, item in enumerate(tree.value if isinstance(tree.value, tuple) else ()):
            self._check_param(item, (*path, number))
        if isinstance(tree.value, str) and REFERENCE.fullmatch(tree.value):
            fact = f"{dotted(path)} is '{tree.value}', but params cannot refer to params"
            self.problems.append(Problem(codes.UNKNOWN_PARAM, tree.span.place(path), fact, "write the value"))
