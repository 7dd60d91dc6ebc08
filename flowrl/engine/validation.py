"""Validation between steps: walks through a part of the graph, on rows of their own, in which nothing trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.engine.clock import now
from flowrl.engine.front import admit
from flowrl.engine.tally import Tally
from flowrl.graph.plan import Plan, Walk
from flowrl.schedule.base import Progress

if TYPE_CHECKING:
    from flowrl.engine.loop import Loop


async def validate(loop: Loop, step: int) -> dict[str, float]:
    """Run the evaluations that are due after a step, and give what they report; of all else nothing is recorded."""
    metrics: dict[str, float] = {}
    for walk in loop.plan.walks(step):
        loop.measured, start = Tally(step), now()
        graph, prompts = loop.plan.graph_of(walk), loop.validation[walk.evaluations[0]]
        uids = admit(loop.store, loop.cluster, graph, prompts, walk.asked.samples).rows.uids
        await loop.walk(Progress(graph, step, uids, blocks(loop.plan, walk), walk.asked))
        loop.store.forget(uids)
        seconds = now() - start
        for name in walk.evaluations:
            metrics |= {**loop.measured.reported(name), f"time/{name}": seconds}
    return metrics


def blocks(plan: Plan, walk: Walk) -> dict[str, int]:
    """Groups that a node works on at a time.

    One that generates has no more sessions at a time than in training, but a group for each copy of its model.
    """
    rollouts = [node for node in plan.graph.nodes.values() if node.weights == "generates"]
    copies = {node.name: plan.pools[plan.pool_of(node)].workers // node.workers_per_copy for node in rollouts}
    fitting = max(1, plan.num_samples // walk.asked.samples)
    return {**plan.canonical_groups, **{name: max(fitting, num) for name, num in copies.items()}}
