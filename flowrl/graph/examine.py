"""From a document to its problems and its plan: bind, build, cut, check, prune."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.errors import Problem
from flowrl.fields import FieldType
from flowrl.graph.bind import BoundNode, bind, declared
from flowrl.graph.build import Graph, build
from flowrl.graph.checks import check
from flowrl.graph.plan import Plan
from flowrl.graph.pools import physical_pools
from flowrl.graph.select import leading_to, needed, part, unknown_goals
from flowrl.graph.subject import Subject
from flowrl.spec.document import Document
from flowrl.spec.read import Reading, without_collection


@dataclass(frozen=True)
class Found:
    """What the checks make of a document."""

    problems: tuple[Problem, ...]
    plan: Plan | None
    """None when one of the problems is an error."""
    nodes: Mapping[str, BoundNode]
    """Every node that could be bound."""


@without_collection()
def examine(reading: Reading, folder: Path, goals: Collection[str] = ()) -> Found:
    """Every problem of a document, and its plan when none of them is an error.

    With `goals`, the graph is cut to these nodes and what they depend on.
    """
    document = reading.document
    if document is None:
        return Found(reading.problems, None, {})
    bound = bind(document, reading, folder)
    lost = unknown_goals(goals, declared(reading, "nodes"))
    if lost:
        return Found((*reading.problems, *bound.problems, *lost), None, bound.nodes)
    data_is_broken = any(p.code == "FR018" for p in reading.problems) or reading.is_broken(("data", "train"))
    columns = {} if data_is_broken else document.data["train"].field_types()
    others = {} if data_is_broken else _validation_columns(document, bound.nodes.values(), reading)
    graph = build(bound.nodes, columns, others)
    if goals:
        graph = build(part(bound.nodes, leading_to(graph, goals)), columns, others)
    subject = Subject(
        document, replace(reading, broken=bound.broken), bound, graph, columns, not data_is_broken, frozenset(goals),
        others,
    )  # fmt: skip
    problems = check(subject)
    if any(problem.severity == "error" for problem in problems):
        return Found(problems, None, bound.nodes)
    document = _cut(document, graph) if goals else document
    plan = Plan(document, graph, physical_pools(document.pools, graph.nodes.values()), problems)
    kept = needed(graph, goals)
    if document.run.prune and kept and len(kept) < len(graph.nodes):
        plan = _pruned(plan, build(part(graph.nodes, kept), columns, others))
    return Found(plan.warnings, plan, bound.nodes)


def _validation_columns(
    document: Document, nodes: Iterable[BoundNode], reading: Reading
) -> dict[str, dict[str, FieldType]]:
    """The columns of the data sets that evaluations name, so far as they are known."""
    named = {node.evaluation.dataset for node in nodes if node.evaluation is not None}
    right = [name for name in named if name in document.data and not reading.is_broken(("data", name))]
    found = {name: document.data[name].field_types() for name in right}
    return {name: types for name, types in found.items() if types}


def _cut(document: Document, graph: Graph) -> Document:
    """The document with the nodes of the graph, and the models that they use."""
    used = {name for node in graph.nodes.values() for name in node.models}
    models = part(document.models, {name for name in document.models if name in used})
    return document.model_copy(update={"models": models, "nodes": part(document.nodes, graph.nodes)})


def _pruned(plan: Plan, graph: Graph) -> Plan:
    """The plan with the nodes of the smaller graph only, and no warning about those that are left out."""
    gone = {f"nodes.{name}" for name in plan.graph.nodes.keys() - graph.nodes.keys()}
    document = _cut(plan.document, graph)
    warnings = tuple(p for p in plan.warnings if p.code != "FR030" or p.place.path not in gone)
    return Plan(document, graph, physical_pools(document.pools, graph.nodes.values()), warnings, plan)
