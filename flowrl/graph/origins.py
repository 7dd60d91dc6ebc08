"""Where rows come from: the rollouts whose trajectories a node works on."""

from __future__ import annotations

from flowrl.graph.bind import BoundNode
from flowrl.graph.build import Field, Graph, upstream


def fields_of(node: BoundNode, graph: Graph) -> tuple[list[Field], list[Field]]:
    """The fields that a node reads, and those of them that have a value per token."""
    fields = [graph.fields[name] for name in node.fields_read if name in graph.fields]
    return fields, [field for field in fields if field.type.axis in ("Token", "PromptToken")]


def origins_of(graph: Graph) -> dict[str, list[str]]:
    """By node the rollouts that its rows come from: by way of the fields per token, or of all where it reads none."""
    after: dict[str, list[str]] = {}
    for node in graph.nodes.values():
        if node.weights != "generates":
            fields, of_tokens = fields_of(node, graph)
            for field in of_tokens or fields:
                after.setdefault(field.writer, []).append(node.name)
    found: dict[str, list[str]] = {}
    for rollout in (node.name for node in graph.nodes.values() if node.weights == "generates"):
        for name in upstream(after, [rollout]):  # the same walk, the other way
            found.setdefault(name, []).append(rollout)
    return found
