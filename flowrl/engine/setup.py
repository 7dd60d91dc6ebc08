"""From a plan to the workers that carry it out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flowrl.engine.call import NodeSetup, WorkerSetup
from flowrl.functions import code_named_in
from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.sizes.batches import optimizer_steps

LOOPBACK = "127.0.0.1"
"""Where everything listens in a cluster that a run starts."""
THREAD_SETTINGS = {"GOMP_SPINCOUNT": "10000"}
"""Environment of every process that computes.

Threads that wait spin for microseconds, then sleep: longer spinning makes a step take seconds on a busy machine, and
sleeping at once takes half as long again on an idle one.
"""


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def accelerators_here(local: bool, address: str | None) -> bool | None:
    """Whether a run would find any on this machine; None where a cluster must be asked."""
    if local or address is not None:
        return False if local else None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0].strip()
    return visible not in ("", "-1") and any(Path("/dev").glob("nvidia[0-9]*"))


def worker_setups(plan: Plan, *, num_cores: int, device: str = "cpu", can_kill: bool = True) -> list[WorkerSetup]:
    """One set-up for each worker of each pool.

    Computing threads are shared out between the workers that hold models: two that both take all cores slow everything
    down, Ray's own calls included.
    """
    with_models = sum(pool.workers for pool in plan.pools.values() if pool.holds_model)
    num_threads = max(1, num_cores // max(1, with_models))
    document, steps = plan.document, optimizer_steps(plan)
    threads = {
        name: pool.threads_per_worker or (num_threads if pool.holds_model else 1) for name, pool in plan.pools.items()
    }
    return [
        WorkerSetup(
            pool.name, rank, pool.workers, _nodes_on(plan, pool.name), document.models, document.run.seed,
            threads[pool.name], device if pool.holds_model else "cpu", document.run.strict_io,
            can_kill, _trained_on(plan, pool.name), steps, document.updates_per_sync,
        )
        for pool in plan.pools.values()
        for rank in range(pool.workers)
    ]  # fmt: skip


def _nodes_on(plan: Plan, pool: str) -> tuple[NodeSetup, ...]:
    nodes = [plan.graph.nodes[name] for name in plan.graph.order]
    return tuple(_setup(plan, node) for node in nodes if pool in _homes(plan, node))


def _trained_on(plan: Plan, pool: str) -> tuple[str, ...]:
    updates = [node for node in plan.graph.nodes.values() if node.weights == "updates" and plan.pool_of(node) == pool]
    return tuple(node.model for node in updates if node.model is not None)


def _homes(plan: Plan, node: BoundNode) -> Sequence[str]:
    """A sync node lives with the trained weights and with every engine that serves them."""
    engines = plan.engine_pools(node.model) if node.weights == "syncs" else []
    return [plan.pool_of(node), *engines]


def _setup(plan: Plan, node: BoundNode) -> NodeSetup:
    return NodeSetup(
        node.name, node.ref, node.spec.params, node.model, node.reads, node.writes, plan.outputs[node.name],
        node.on_error, node.spec.timeout, code_named_in(node.spec.params),
    )  # fmt: skip
