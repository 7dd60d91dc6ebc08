"""What a node may read in the place of a field that is not there or has another type."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import islice
from pathlib import Path

from flowrl.errors import nearest
from flowrl.fields import FieldType, Port
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import Field, Graph, upstream
from flowrl.registry import find, own_names

NUM_SHOWN = 4
"""Fields of the right type that a message names."""
NUM_NEIGHBOURS = 20
NUM_WRITERS = 3
"""Nodes of the library that a message names."""


class Names:
    """Names among which that of a misspelt one is looked for: a slip of the pen leaves its beginning or its end.

    So only the neighbours in the order of the alphabet are compared, from the left and from the right: each comparison
    is slow, and a pipeline may have thousands of fields.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._forward = sorted(names)
        self._backward = sorted(name[::-1] for name in self._forward)

    def around(self, name: str) -> set[str]:
        """Those that begin or end as this one does, as far as there are such."""
        before, after = _around(self._forward, name), _around(self._backward, name[::-1])
        return {*before, *(other[::-1] for other in after)}


def _around(names: list[str], name: str) -> list[str]:
    place = bisect_left(names, name)
    return names[max(place - NUM_NEIGHBOURS, 0) : place + NUM_NEIGHBOURS]


class Offers:
    """The fields of a graph by type. A node is never offered what follows from it: it would wait for itself."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._fields: dict[FieldType, list[Field]] = {}
        for field in graph.fields.values():
            self._fields.setdefault(field.type, []).append(field)
        self._names: dict[FieldType, Names] = {}

    def to(self, node: BoundNode, wanted: FieldType) -> list[Field]:
        """Some fields of the type, in the order of declaration."""
        return list(islice(self._possible(node, self._readable(wanted)), NUM_SHOWN))

    def unread(self, node: BoundNode, wanted: FieldType, field: str = "") -> str:
        """The first field of the type that no node reads, and so may be the one that was meant; empty without any.

        With `field`, only such as another node writes in the place of that, under another name.
        """
        unread = (found for found in self._possible(node, self._readable(wanted)) if not found.readers)
        nodes = self._graph.nodes
        return next((one.name for one in unread if not field or nodes[one.writer].writes.get(field) == one.name), "")

    def near(self, node: BoundNode, wanted: FieldType, field: str, unread: bool = False) -> str:
        """The name of the type that this one is a slip of, maybe of those alone that no node reads; empty without."""
        if wanted not in self._names:
            self._names[wanted] = Names(found.name for found in self._readable(wanted))
        around = (self._graph.fields[name] for name in self._names[wanted].around(field))
        possible = (found.name for found in self._possible(node, around) if not (unread and found.readers))
        said = nearest(field, possible)
        return said.split("'")[1] if said.startswith("did you mean") else ""

    def _readable(self, wanted: FieldType) -> Iterator[Field]:
        """The fields that a port of the type may read, those of the very type first."""
        types = sorted((type_ for type_ in self._fields if wanted.accepts(type_)), key=lambda type_: type_ != wanted)
        return (field for type_ in types for field in self._fields[type_])

    def _possible(self, node: BoundNode, fields: Iterable[Field]) -> Iterator[Field]:
        later = upstream(self._graph.targets, [node.name])
        return (field for field in fields if field.writer not in later)


def library_writers(field: str, wanted: FieldType) -> str:
    """The nodes of the library that write such a field, as they are written; else those that may write it renamed."""
    for renamed in (False, True):
        found = [
            f"{{use: {use}, writes: {{{port}: {field}}}}}" if renamed else f"{{use: {use}}}"
            for use, ports in _library().items()
            for port in ports
            if wanted.accepts(ports[port].type) and (field.endswith(f"_{port}") if renamed else field == port)
        ]
        if found:
            return " or ".join(found[:NUM_WRITERS])
    return ""


@cache
def _library() -> Mapping[str, Mapping[str, Port]]:
    """What the nodes of our library write; those of others may take long to import."""
    return {use: find(use, Path()).load().output_ports for use in own_names()}


def shown(fields: Iterable[Field]) -> list[str]:
    """For the notes of a problem."""
    return [f"'{field.name}' ({field.type}, written by {field.writer}) has the right type" for field in fields]
