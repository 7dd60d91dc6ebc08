"""`$name`: a whole value that is replaced by the param of that name. Nothing else is a template; `cost $5` stays."""

from __future__ import annotations

import re

from flowrl.errors import Problem, nearest
from flowrl.spec import codes
from flowrl.spec.scalars import write
from flowrl.spec.tree import Path_, Tree, dotted, with_items, with_parts

REFERENCE = re.compile(r"\$([A-Za-z_][A-Za-z0-9_-]*)")
"""What params can be called, after a dollar."""
_NEARLY = re.compile(r"\$(?:\{.*\}?|[\w.-]*[^\W\d_][\w.-]*)")
"""Meant as a reference: in braces, or one word with a letter in it. `$5` is no such word."""


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
        if not isinstance(tree.value, str):
            return tree
        match = REFERENCE.fullmatch(tree.value)
        if match is None:
            return self._refused(tree, tree.value, path) if _NEARLY.fullmatch(tree.value) else tree
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

    def _refused(self, tree: Tree, text: str, path: Path_) -> Tree:
        """For a value that would stay as it is, though it was meant as a reference."""
        self.broken.add(path)
        name = text.lstrip("${").partition("}")[0].strip()
        known = self.params if self.usable else {}
        fix = f"write ${name}" if name in known else nearest(name, known) or "write $NAME, with NAME under `params:`"
        fact = f"{write(text)} is no reference to a param: those are $ and a name of letters, digits, _ and -"
        self.problems.append(Problem(codes.UNKNOWN_PARAM, tree.span.place(path), fact, fix))
        return Tree(None, tree.span)

    def _check_param(self, tree: Tree, path: Path_) -> None:
        for name, entry in tree.entries.items():
            self._check_param(entry.tree, (*path, name))
        for number, item in enumerate(tree.value if isinstance(tree.value, tuple) else ()):
            self._check_param(item, (*path, number))
        if isinstance(tree.value, str) and (REFERENCE.fullmatch(tree.value) or _NEARLY.fullmatch(tree.value)):
            fact = f"{dotted(path)} is '{tree.value}', but params cannot refer to params"
            self.problems.append(Problem(codes.UNKNOWN_PARAM, tree.span.place(path), fact, "write the value"))
