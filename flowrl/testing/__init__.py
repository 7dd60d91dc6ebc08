"""For tests of nodes and pipelines, the users' and our own: no engine, no cluster, no mock.

batch = toy_batch(LengthPenalty)                          # small, ragged, awkward columns for every port
out = run_node(LengthPenalty(budget=8), batch)            # its `Out`
check_node(LengthPenalty)                                 # what every node owes the engine, or NodeTestError
assert_plan(flowrl.load("my.yaml"), levels=[["rollout"], ["reward"]])
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from flowrl.catalogue import smallest_parameters
from flowrl.graph.plan import Plan
from flowrl.node import Context, Node
from flowrl.pipeline import Pipeline, load
from flowrl.testing.contract import verdicts
from flowrl.testing.faults import Verdict
from flowrl.testing.toy import run_node, toy_batch, toy_context

__all__ = ["NodeTestError", "assert_plan", "check_node", "run_node", "toy_batch", "toy_context", "verdicts_of"]


class NodeTestError(AssertionError):
    """A node breaks its contract; the message holds every property that does not hold, with what breaks it."""

    def __init__(self, node: str, failed: Sequence[Verdict]) -> None:
        self.failed = tuple(verdict.name for verdict in failed)
        super().__init__("\n".join([f"{node}:", *(f"  {one.name}: FAILED\n{_indented(one)}" for one in failed)]))


def verdicts_of(
    node: Node | type[Node], *, seed: int = 0, context: Context | None = None, **parameters: Any
) -> list[Verdict]:
    """Each property of a node with whether it holds. A class is made with the parameters given, and with the smallest
    values that its required ones allow. A sync has no `run`, and no properties that could be tried without an engine.
    """
    made = node if isinstance(node, Node) else node(**{**smallest_parameters(node), **parameters})
    return [] if made.weights == "syncs" else verdicts(made, seed=seed, context=context)


def check_node(
    node: Node | type[Node], *, seed: int = 0, context: Context | None = None, **parameters: Any
) -> list[str]:
    """The properties that hold, as `flowrl test-node` prints them. Raises `NodeTestError` if any does not."""
    found = verdicts_of(node, seed=seed, context=context, **parameters)
    failed = [verdict for verdict in found if verdict.holds is False]
    if failed:
        raise NodeTestError(type(node).__name__ if isinstance(node, Node) else node.__name__, failed)
    return [verdict.name for verdict in found if verdict.holds]


def _indented(verdict: Verdict) -> str:
    return "\n".join(f"    {line}" for line in verdict.details.split("\n"))


def assert_plan(
    pipeline: Plan | Pipeline | str | Path,
    *,
    levels: Iterable[Iterable[str]] | None = None,
    edges: Iterable[str] | None = None,
    fields: Iterable[str] | None = None,
) -> None:
    """The plan has exactly these levels, edges or fields; what is left out is not looked at.

    Edges are written `reward -> advantage: reward`, and `sync => rollout: policy` where they lead into the next step;
    fields `reward: Sample[float] by reward for advantage, update`. Order within each does not matter, that of levels
    does. Raises `AssertionError` with a diff, `PipelineError` if there is no plan.
    """
    plan = pipeline if isinstance(pipeline, Plan) else (_loaded(pipeline)).plan()
    graph = plan.graph
    if levels is not None:
        shown = [" ".join(sorted(level)) for level in graph.levels]
        _compare("levels", [" ".join(sorted(level)) for level in levels], shown)
    if edges is not None:
        shown = [f"{e.source} {'=>' if e.distance else '->'} {e.target}: {e.label}" for e in graph.edges]
        _compare("edges", sorted(edges), sorted(shown))
    if fields is not None:
        found = [
            f"{f.name}: {f.type} by {f.writer} for {', '.join(f.readers) or 'nobody'}" for f in graph.fields.values()
        ]
        _compare("fields", sorted(fields), sorted(found))


def _loaded(pipeline: Pipeline | str | Path) -> Pipeline:
    return pipeline if isinstance(pipeline, Pipeline) else load(pipeline)


def _compare(what: str, wanted: Sequence[str], found: Sequence[str]) -> None:
    if list(wanted) != list(found):
        diff = difflib.unified_diff(wanted, found, f"{what} wanted", f"{what} of the plan", lineterm="", n=99)
        raise AssertionError("\n".join(diff))
