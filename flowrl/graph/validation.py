"""Validation in the graph: which nodes work for evaluations alone, and the walks on which evaluations run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flowrl.evaluation import Evaluation
from flowrl.fields import FieldType

if TYPE_CHECKING:
    from flowrl.graph.bind import BoundNode

Types = Mapping[str, FieldType]
"""The columns of a data set."""


def only_validated(nodes: Mapping[str, BoundNode]) -> dict[str, frozenset[str]]:
    """The evaluations, and the nodes whose every reader is one of these: no training row reaches them.

    With the data sets whose rows do; none of an evaluation whose parameters are wrong.
    """
    sources = field_sources(nodes)
    readers: dict[str, set[str]] = {name: set() for name in nodes}
    for name, read in sources.items():
        for source in read:
            readers[source].add(name)
    found = {name: frozenset(_datasets(node)) for name, node in nodes.items() if node.evaluates}
    waiting = list(found)
    while waiting:
        for source in sources[waiting.pop()]:
            node = nodes[source]
            trains = node.weights in ("updates", "syncs") or node.spec.gate is not None
            if source not in found and not trains and readers[source] <= found.keys():
                found[source] = frozenset().union(*(found[reader] for reader in readers[source]))
                waiting.append(source)
    return found


def _datasets(node: BoundNode) -> Iterable[str]:
    return [node.evaluation.dataset] if node.evaluation is not None else []


def field_sources(nodes: Mapping[str, BoundNode]) -> dict[str, set[str]]:
    """For each node those whose fields it reads."""
    writers: dict[str, str] = {}
    for name, node in nodes.items():
        for field in node.writes.values():
            writers.setdefault(field, name)
    reads = {name: [field for field in node.fields_read if field in writers] for name, node in nodes.items()}
    return {name: {writers[field] for field in fields} - {name} for name, fields in reads.items()}


def evaluation_of(node: BoundNode) -> Evaluation:
    """The node as what it is; its parameters have been checked."""
    assert node.evaluation is not None, "checked before"
    return node.evaluation
