"""The graph of a pipeline: fields with their writer and readers, and the edges that follow from them.

Edges are derived, never written. Field edges run from the writer of a field to its readers. Weight edges keep a model's
training weights in order: its readers, then its update, then its sync, then the *next* step's rollout. Gate edges keep
whatever reads the fields of a gate's ancestors waiting until the gate has kept enough groups. Evaluations, and nodes
that work for these alone, come last: after the update or the sync of the weights that they use.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from flowrl.fields import FieldType
from flowrl.graph.bind import BoundNode
from flowrl.graph.validation import Types, field_sources, only_validated

if TYPE_CHECKING:
    import networkx as nx

DATA = "data"
"""Writer of the data set's columns."""


@dataclass(frozen=True)
class Field:
    """A field of the pipeline."""

    name: str
    type: FieldType
    writer: str
    """Name of the node, or `data`."""
    readers: tuple[str, ...]


@dataclass(frozen=True, order=True)
class Edge:
    """`target` waits for `source`; with a distance of 1, for the source of the step before."""

    source: str
    target: str
    kind: Literal["field", "weights", "gate"]
    label: str
    """Name of the field, of the model, or of the field that says which groups to keep."""
    distance: int = 0

    @property
    def shown(self) -> str:
        """What the edge carries, for people."""
        return {"field": "", "weights": "weights of ", "gate": "gate "}[self.kind] + self.label


@dataclass(frozen=True)
class Graph:
    """An immutable pipeline graph."""

    nodes: Mapping[str, BoundNode]
    fields: Mapping[str, Field]
    edges: tuple[Edge, ...]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Nodes in an order that respects every edge within a step; independent of the order of declaration."""
        return tuple(name for level in self.levels for name in level)

    @cached_property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """Nodes that may run at the same time, level by level. The graph must have no cycle."""
        import networkx as nx

        return tuple(tuple(sorted(level)) for level in nx.topological_generations(self._within_step))

    def cycles(self) -> list[list[Edge]]:
        """One cycle for each knot of nodes that wait for each other, as the edges along it."""
        import networkx as nx

        graph = self._within_step
        knots = [c for c in nx.strongly_connected_components(graph) if len(c) > 1 or graph.has_edge(*list(c) * 2)]
        found = []
        for knot in sorted(knots, key=min):
            path = nx.find_cycle(graph.subgraph(knot), min(knot))
            found.append([graph.edges[source, target]["edge"] for source, target, *_ in path])
        return found

    @cached_property
    def only_validated(self) -> Mapping[str, frozenset[str]]:
        """The nodes that never see a training row, with the data sets whose rows they work on."""
        return only_validated(self.nodes)

    @cached_property
    def training(self) -> Graph:
        """What a step runs on training rows."""
        return self.restricted(self.nodes.keys() - self.only_validated.keys()) if self.only_validated else self

    def leading_to(self, names: Iterable[str]) -> frozenset[str]:
        """These nodes and all whose fields they follow from."""
        return frozenset(upstream(field_sources(self.nodes), names))

    def restricted(self, names: Collection[str], columns: Types | None = None) -> Graph:
        """The part of the graph with these nodes; `columns` are those of other data in the place of the training data.

        A field of the training data that nobody here reads is left out.
        """
        fields = {}
        for field in self.fields.values():
            readers = tuple(reader for reader in field.readers if reader in names)
            if field.writer in names or (field.writer == DATA and readers):
                other = (columns or {}).get(field.name, field.type) if field.writer == DATA else field.type
                fields[field.name] = replace(field, type=other, readers=readers)
        kept = {name: node for name, node in self.nodes.items() if name in names}
        edges = (e for e in self.edges if e.target in names and (e.source in names or e.source == DATA))
        return Graph(kept, fields, tuple(edges))

    @cached_property
    def sources(self) -> Mapping[str, frozenset[str]]:
        """For each node those that it waits for within a step; `data` is one of them."""
        return self._grouped((edge.target, edge.source) for edge in self.edges if not edge.distance)

    @cached_property
    def targets(self) -> Mapping[str, frozenset[str]]:
        """For each node, and `data`, those that wait for it within a step."""
        return self._grouped((edge.source, edge.target) for edge in self.edges if not edge.distance)

    def _grouped(self, pairs: Iterable[tuple[str, str]]) -> Mapping[str, frozenset[str]]:
        found: dict[str, set[str]] = {name: set() for name in (DATA, *self.nodes)}
        for name, other in pairs:
            found[name].add(other)
        return {name: frozenset(others) for name, others in found.items()}

    @cached_property
    def _within_step(self) -> nx.DiGraph[str]:
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from(sorted(self.nodes))
        for edge in reversed(self.edges):  # of several edges the first by name is kept as the label
            if edge.source != DATA and not edge.distance:
                graph.add_edge(edge.source, edge.target, edge=edge)
        return graph


def build(nodes: Mapping[str, BoundNode], columns: Types, others: Mapping[str, Types] | None = None) -> Graph:
    """The graph of these nodes over the columns of the training data, and of other data sets whose columns are known.

    Mistakes are not judged here: of two writers the first counts, a field that nobody writes has no edge. An optional
    port is bound when another node writes its field, and when the user names its field by hand.
    """
    writers: dict[str, tuple[str, FieldType]] = {name: (DATA, type_) for name, type_ in columns.items()}
    for name, node in nodes.items():
        for port, field in node.writes.items():
            writers.setdefault(field, (name, node.cls.output_ports[port].type))
    bare, nodes = nodes, {name: _without_unwritten(node, writers) for name, node in nodes.items()}
    evaluated = only_validated(nodes)
    for name, sets in evaluated.items():
        nodes[name], more = _over(bare[name], writers, [(others or {}).get(one) for one in sorted(sets)])
        writers |= {column: (DATA, type_) for column, type_ in more.items()}
    readers: dict[str, list[str]] = {name: [] for name in writers}
    edges: set[Edge] = set()
    for name in sorted(nodes):
        for field in nodes[name].fields_read:
            if field in writers:
                readers[field].append(name)
                edges.add(Edge(writers[field][0], name, "field", field))
    fields = {name: Field(name, type_, writer, tuple(readers[name])) for name, (writer, type_) in writers.items()}
    edges |= {*weight_edges(nodes, evaluated), *gate_edges(nodes, edges, evaluated)}
    return Graph(nodes, fields, tuple(sorted(edges, key=attrgetter("source", "target", "kind", "label", "distance"))))


def weight_edges(nodes: Mapping[str, BoundNode], evaluated: Collection[str]) -> Iterable[Edge]:
    """Readers of a model's training weights, its update, its sync, the next step's rollout: in this order.

    Those that are only `evaluated` come after the update or sync of the same step, as does an evaluation that lets
    others use the model.
    """
    by_role: dict[tuple[str, str], list[str]] = {}
    for node in nodes.values():
        if node.model and node.weights and node.name not in evaluated:
            by_role.setdefault((node.model, node.weights), []).append(node.name)
    yield from _late_edges(nodes, evaluated, by_role)
    for (model, role), updates in by_role.items():
        if role != "updates":
            continue
        for update in updates:
            yield from (Edge(n, update, "weights", model) for n in by_role.get((model, "reads"), ()))
            yield from (Edge(update, n, "weights", model) for n in by_role.get((model, "syncs"), ()))
    for (model, role), syncs in by_role.items():
        if role == "syncs":
            rollouts = by_role.get((model, "generates"), ())
            yield from (Edge(sync, rollout, "weights", model, 1) for sync in syncs for rollout in rollouts)


def _late_edges(
    nodes: Mapping[str, BoundNode], evaluated: Collection[str], by_role: Mapping[tuple[str, str], Iterable[str]]
) -> Iterator[Edge]:
    before = {"generates": "syncs", "reads": "updates"}
    sources = field_sources(nodes)
    for name in evaluated:
        # What it lets others do with models, unless they themselves come as late.
        users = {name, *(upstream(sources, [name]) - set(evaluated) if nodes[name].evaluates else ())}
        for user in (nodes[user] for user in users):
            for writer in by_role.get((user.model or "", before.get(user.weights or "", "")), ()):
                yield Edge(writer, name, "weights", user.model or "")


def gate_edges(
    nodes: Mapping[str, BoundNode], field_edges: Iterable[Edge], evaluated: Collection[str]
) -> Iterator[Edge]:
    """From the gate to every node that reads what the gate's ancestors write, and is none of them.

    Validation rows pass no gate.
    """
    gate = next((node for node in nodes.values() if node.spec.gate is not None), None)
    if gate is None:
        return
    sources: dict[str, set[str]] = {}
    for edge in field_edges:
        sources.setdefault(edge.target, set()).add(edge.source)
    reruns = upstream(sources, [gate.name])
    others = (name for name in nodes if name not in reruns and name not in evaluated)
    waiting = (name for name in others if sources.get(name, set()) & (reruns - {DATA}))
    yield from (Edge(gate.name, name, "gate", gate.spec.gate or "") for name in waiting)


def upstream(sources: Mapping[str, Iterable[str]], names: Iterable[str]) -> set[str]:
    """These names and whatever they follow from, where `sources` gives for each name those directly before it."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += sources.get(name, ())
    return found


def _over(
    node: BoundNode, writers: Mapping[str, tuple[str, FieldType]], sets: Iterable[Types | None]
) -> tuple[BoundNode, Types]:
    """A node over data sets other than the training data, and the columns that it reads of those alone."""
    known = [columns for columns in sets if columns is not None]
    if not known:
        return _without_unwritten(node, writers), {}
    written = {field: writer for field, writer in writers.items() if writer[0] != DATA}
    every = {column: (DATA, type_) for column, type_ in known[0].items() if all(column in other for other in known)}
    node = _without_unwritten(node, {**every, **written})
    columns = {column: type_ for other in known for column, type_ in other.items()}
    return node, {field: columns[field] for field in node.fields_read if field in columns and field not in writers}


def _without_unwritten(node: BoundNode, writers: Mapping[str, tuple[str, FieldType]]) -> BoundNode:
    asked = node.demands | node.spec.reads.keys()
    kept = {
        port: fields
        for port, fields in node.reads.items()
        if port in asked
        or not node.cls.input_ports[port].optional
        or any(field in writers and writers[field][0] != node.name for field in fields)
    }
    return replace(node, reads=kept)
