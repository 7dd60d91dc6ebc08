"""Validation between steps: walks through a part of the graph, on rows of their own, in which nothing trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowrl.batch import Batch, Prompt
from flowrl.column import Column, as_array
from flowrl.data import stream
from flowrl.engine.tally import Tally
from flowrl.graph.build import DATA, Graph
from flowrl.graph.plan import Plan, Walk
from flowrl.rows import Rows
from flowrl.schedule.base import Progress

if TYPE_CHECKING:
    from flowrl.engine.loop import Loop


async def validate(loop: Loop, step: int) -> dict[str, float]:
    """Run the evaluations that are due after a step, and give what they report; of all else nothing is recorded."""
    metrics: dict[str, float] = {}
    for walk in loop.plan.walks(step):
        loop.tally, loop.failed_attempts, start = Tally(step), {}, time.time()
        graph = loop.plan.graph_of(walk)
        batch = admit(loop, graph, loop.validation[walk.evaluations[0]], walk.asked.samples)
        await loop.walk(Progress(graph, step, batch.rows.uids, blocks(loop.plan, walk), walk.asked))
        seconds = time.time() - start
        for name in walk.evaluations:
            metrics |= {**loop.tally.reported(name), f"time/{name}": seconds}
    return metrics


def blocks(plan: Plan, walk: Walk) -> dict[str, int]:
    """Groups that a node works on at a time.

    One that generates has no more sessions at a time than in training, but a group for each copy of its model.
    """
    rollouts = [node for node in plan.graph.nodes.values() if node.weights == "generates"]
    copies = {node.name: plan.pools[plan.pool_of(node)].workers // node.workers_per_copy for node in rollouts}
    fitting = max(1, plan.num_samples // walk.asked.samples)
    return {**plan.canonical_groups, **{name: max(fitting, num) for name, num in copies.items()}}


def admit(loop: Loop, graph: Graph, prompts: Sequence[stream.Prompt], num_sessions: int) -> Batch:
    """Put the columns of prompts that a part of the graph reads where its nodes find them, and return them."""
    num = len(prompts)
    rows = Rows([prompt.uid for prompt in prompts], planned=[num_sessions] * num, settled=[0] * num)
    fields = [field for field in graph.fields.values() if field.writer == DATA and field.readers]
    columns: dict[str, Column[Any]] = {
        f.name: Prompt(rows, as_array([prompt.row[f.name] for prompt in prompts], f.type.dtype)) for f in fields
    }
    batch = Batch(rows, columns, {f.name: f.type for f in fields})
    if columns:
        loop.store.add(loop.cluster.put(batch), columns, rows)
    return batch
