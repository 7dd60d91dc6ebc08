"""Parts of a graph: what leads to chosen nodes, and what a run needs at all."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from flowrl.errors import Place, Problem, nearest
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA, Graph, upstream

OPTION = "--to-nodes"
N = TypeVar("N")


def leading_to(graph: Graph, names: Iterable[str]) -> frozenset[str]:
    """These nodes and all that they need within a step.

    An update waits for the readers of its weights, but does not need them: what they write may be read by nobody.
    """
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        in_step = not edge.distance and edge.source != DATA
        if in_step and (edge.kind != "weights" or graph.nodes[edge.target].weights == "syncs"):
            sources.setdefault(edge.target, []).append(edge.source)
    return frozenset(upstream(sources, names))


def needed(graph: Graph, goals: Collection[str] = ()) -> frozenset[str]:
    """Nodes that the goals or the training depend on; empty where nothing trains and no goal is named."""
    generated = {node.model for node in graph.nodes.values() if node.weights == "generates"}
    effects = [name for name, node in graph.nodes.items() if _has_effect(node, generated)]
    trains = any(graph.nodes[name].weights == "updates" for name in effects)
    return leading_to(graph, [*effects, *goals]) if trains or goals else frozenset()


def _has_effect(node: BoundNode, generated: Collection[str | None]) -> bool:
    """Whether a node is there for what it does, not for what it writes."""
    if node.weights == "syncs":
        return node.model in generated
    return node.weights == "updates" or not node.cls.output_ports


def part(nodes: Mapping[str, N], kept: Collection[str]) -> dict[str, N]:
    """The kept ones, in their order."""
    return {name: node for name, node in nodes.items() if name in kept}


def unknown_goals(goals: Iterable[str], known: Collection[str]) -> list[Problem]:
    """FR009: `--to-nodes` names nodes of the pipeline."""
    return [
        Problem("FR009", Place(OPTION, 1, 1, max(len(goal), 1), goal, goal), f"no node is called '{goal}'",
                nearest(goal, known))
        for goal in goals if goal not in known
    ]  # fmt: skip
