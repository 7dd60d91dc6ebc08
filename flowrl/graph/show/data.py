"""The dry run as plain data for tools: the numbers of the page, in bytes, tokens and FLOPs. Keys: `docs/plan.md`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.graph.sizes.batches import Generation, Passes
from flowrl.graph.sizes.flops import Work
from flowrl.graph.sizes.lengths import Lengths, StepLengths
from flowrl.graph.sizes.measure import Sizes, SyncSize, measure
from flowrl.graph.sizes.memory import PoolMemory

FORMAT = 1
"""Keys are only ever added under the same number; a key that changes its meaning or goes raises it."""


def as_data(plan: Plan, lengths: StepLengths | None = None) -> dict[str, Any]:
    """The plan and its sizes: stable keys, no object of ours, `null` for what is unknown (and `unknown` says why)."""
    sizes = measure(plan, lengths)
    batch = plan.document.batch
    return {
        "format": FORMAT,
        "name": plan.document.name,
        "steps": plan.document.run.steps,
        "batch": {"prompts": batch.prompts, "group": batch.group, "samples": plan.num_samples},
        "schedule": plan.document.schedule.mode,
        "lengths": {
            **_lengths(sizes.lengths.longest),
            "rollouts": {name: _lengths(own) for name, own in sizes.lengths.rollouts.items()},
        },
        "levels": [list(level) for level in plan.graph.levels],
        "pools": _pools(plan, sizes),
        "models": {name: _model(plan, name, model) for name, model in sizes.models.items()},
        "nodes": _nodes(plan, sizes),
        "fields": _fields(plan, sizes),
        "column_bytes_at_a_time": sizes.peak_columns,
        "edges": [
            {"source": e.source, "target": e.target, "kind": e.kind, "label": e.label, "distance": e.distance}
            for e in plan.graph.edges
        ],
        "staleness": {
            "max": plan.slack,
            "prompts_in_flight": plan.document.prompts_in_flight,
            "updates_per_sync": plan.updates_per_sync,
        },
        "resume": {"from_step": 1, "checkpoint_every": _checkpoint_every(plan)},
        "pruned": [name for name in plan.whole.graph.order if name not in plan.graph.nodes] if plan.whole else [],
    }


def _lengths(lengths: Lengths) -> dict[str, Any]:
    return {**asdict(lengths), "too_long": lengths.too_long or None}


def _checkpoint_every(plan: Plan) -> int | None:
    return plan.document.checkpoint.every if plan.document.checkpoint is not None else None


def _pools(plan: Plan, sizes: Sizes) -> dict[str, Any]:
    memory = {each.pool: each for each in sizes.memory}
    return {
        pool.name: {
            "workers": pool.workers,
            "cpus_per_worker": pool.cpus_per_worker,
            "threads_per_worker": pool.threads_per_worker,
            "shared_by": list(pool.logical),
            "memory": _memory(memory[pool.name]) if pool.name in memory else None,
        }
        for pool in plan.pools.values()
    }


def _memory(memory: PoolMemory) -> dict[str, Any]:
    return {
        "limit_bytes": memory.limit,
        "held_bytes": memory.held,
        "peak_bytes": memory.peak,
        "peak_node": memory.dearest or None,
        "shares": [
            {"model": s.model, "what": s.what, "bytes": s.num_bytes, "node": s.node or None, "how": s.how}
            for s in memory.shares
        ],
        "unknown": {name: model.reason for name, model in memory.unknown.items()},
    }


def _model(plan: Plan, name: str, model: Architecture | Unknown) -> dict[str, Any]:
    spec = plan.document.models[name]
    said = {"path": spec.path, "trainable": spec.trainable, "dtype": spec.dtype, "parallel": spec.parallel}
    if isinstance(model, Unknown):
        return {**said, "unknown": model.reason, "architecture": None}
    return {**said, "unknown": None, "architecture": asdict(model)}


def _nodes(plan: Plan, sizes: Sizes) -> dict[str, Any]:
    work = {each.node: each for each in sizes.work}
    syncs = {each.node: each for each in sizes.syncs}
    found = {}
    for name, node in ((name, plan.graph.nodes[name]) for name in plan.graph.order):
        found[name] = {
            "use": node.use,
            "pool": plan.pool_of(node),
            "model": node.model,
            "weights": node.weights,
            "gate": node.spec.gate,
            "every": node.spec.every,
            "validation": _validation(plan, node),
            "reads": [field.name for field in plan.reads(node)],
            "writes": [field.name for field in plan.writes(node)],
            "batch": _cut(sizes.cuts[name], sizes.lengths.of(name)) if name in sizes.cuts else None,
            "compute": _work(work[name]) if name in work else None,
            "sync": _sync(syncs[name]) if name in syncs else None,
        }
    return found


def _validation(plan: Plan, node: BoundNode) -> dict[str, Any] | None:
    """How a node takes part in validation alone: an evaluation, or one that only evaluations need; else null."""
    if node.evaluation is None:
        datasets = plan.graph.only_validated.get(node.name)
        return {"datasets": sorted(datasets)} if datasets is not None else None
    asked = node.evaluation.asked()
    return {
        "datasets": [node.evaluation.dataset],
        "when": node.evaluation.when(node.spec.every),
        "samples": asked.samples,
        "settings": dict(asked.settings),
        "runs": [name for name in plan.graph.order if name in plan.graph.leading_to([node.name]) - {node.name}],
    }


def _cut(cut: Generation | Passes, lengths: Lengths) -> Mapping[str, Any]:
    tokens = {"prompt_tokens": lengths.prompt_tokens, "response_tokens": lengths.response_tokens}
    if isinstance(cut, Generation):
        return {
            **tokens,
            "prompts": cut.num_prompts,
            "workers": cut.workers,
            "prompts_per_worker": list(cut.prompts_per_worker),
            "sessions_at_once": cut.sessions_at_once,
            "waves": cut.num_waves,
        }
    return {
        **tokens,
        "parts": cut.num_parts,
        "prompts": cut.prompts,
        "rows": cut.rows,
        "epochs": cut.epochs,
        "optimizer_steps": cut.num_optimizer_steps,
        "ranks": cut.ranks,
        "rows_per_rank": list(cut.rows_per_rank),
        "micro_batches": cut.num_micro_batches,
        "rows_per_micro_batch": cut.rows_per_micro_batch,
    }


def _work(work: Work) -> Mapping[str, Any]:
    return {
        "flops": None if isinstance(work.flops, Unknown) else work.flops,
        "passes": work.num_passes,
        "tokens": work.num_tokens,
        "tokens_with_logits": work.num_logits,
    }


def _sync(sync: SyncSize) -> Mapping[str, Any]:
    size = None if isinstance(sync.num_bytes, Unknown) else sync.num_bytes
    return {"bytes": size, "receivers": dict(sync.receivers)}


def _fields(plan: Plan, sizes: Sizes) -> dict[str, Any]:
    return {
        field.name: {
            "type": str(field.type),
            "shape": plan.shape(field),
            "writer": field.writer,
            "readers": list(plan.readers(field)),
            "bytes": sizes.fields[field.name].num_bytes,
            "exact": sizes.fields[field.name].exact,
            "released_after": list(sizes.fields[field.name].released_after),
        }
        for field in sorted(plan.graph.fields.values(), key=lambda field: field.name)
    }
