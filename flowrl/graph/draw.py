"""Pictures of a plan as text: the dry run, a tree, a mermaid flowchart, and JSON for tools."""

from __future__ import annotations

from typing import Any

from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA, Edge, Field
from flowrl.graph.plan import Plan
from flowrl.graph.pools import Pool


def as_plan(plan: Plan) -> str:
    """The dry run: levels, and for each node its pool, what it reads and writes, and who reads that next."""
    document = plan.document
    batch = document.batch
    lines = [
        f"{document.name}: {batch.prompts} prompts x {batch.group} samples = {plan.num_samples} trajectories a step, "
        f"{document.run.steps} steps, schedule {document.schedule.mode}",
        "",
        "execution levels (nodes of one level need not wait for each other)",
    ]
    for number, level in enumerate(plan.graph.levels, 1):
        lines.append(f"  {number}. {', '.join(level)}")
    carried = [edge for edge in plan.graph.edges if edge.distance]
    lines += [f"  next step: {edge.target} waits for {edge.source} (weights of {edge.label})" for edge in carried]
    lines += ["", "pools"]
    lines += [f"  {_pool_line(pool, plan)}" for pool in plan.pools.values()]
    for number, level in enumerate(plan.graph.levels, 1):
        for name in level:
            lines += ["", *_node_lines(plan, plan.graph.nodes[name], number)]
    updates = [node for node in plan.graph.nodes.values() if node.weights == "updates"]
    lines += ["", "batch"] * bool(updates)
    lines += [f"  {_batch_line(plan, node)}" for node in updates]
    return "\n".join(lines)


def _pool_line(pool: Pool, plan: Plan) -> str:
    members = [name for name in plan.graph.order if plan.pool_of(plan.graph.nodes[name]) == pool.name]
    shared = [name for name in pool.logical if name != pool.name]
    workers = f"{pool.workers} worker{'s' * (pool.workers > 1)} x {pool.cpus_per_worker:g} CPU"
    also = f", shared by {', '.join(shared)}" if shared else ""
    return f"{pool.name}: {workers}{also}; runs {', '.join(members)}"


def _node_lines(plan: Plan, node: BoundNode, level: int) -> list[str]:
    home = plan.pool_of(node)
    where = home if node.spec.pool in (None, home) else f"{node.spec.pool} (workers of {home})"
    if node.weights == "syncs":
        where = " -> ".join([home, *(pool for pool in plan.engine_pools(node.model) if pool != home)])
    model = f", {node.weights} the weights of model {node.model}" if node.model else ""
    lines = [f"{node.name}: {node.spec.use} (level {level}, pool {where}{model})"]
    reads = [(field, f"written by {field.writer}") for field in plan.reads(node)]
    writes = [(field, f"next read by {', '.join(field.readers) or 'nobody'}") for field in plan.writes(node)]
    for title, fields in (("reads", reads), ("writes", writes)):
        lines += [f"  {title:<6} {_field_line(plan, field)}  {note}" for field, note in fields]
        lines += [f"  {title:<6} nothing"] * (not fields)
    return lines


def _field_line(plan: Plan, field: Field) -> str:
    batch = plan.document.batch
    width = max((len(name) for name in plan.graph.fields), default=0)
    return f"{field.name:<{width}}  {field.type!s:<16}  {field.type.shape(batch.prompts, batch.group):<22}"


def _batch_line(plan: Plan, node: BoundNode) -> str:
    batch = plan.document.batch
    minibatch, epochs = getattr(node.node, "minibatch", batch.prompts), getattr(node.node, "epochs", 1)
    steps = batch.prompts // minibatch * epochs
    ranks = plan.pools[plan.pool_of(node)].workers
    rows = minibatch * batch.group
    return (
        f"{node.name}: {batch.prompts} prompts in mini-batches of {minibatch} ({rows} trajectories), {epochs} "
        f"epoch{'s' * (epochs > 1)} = {steps} optimizer step{'s' * (steps > 1)}; about {rows / ranks:g} trajectories "
        f"for each of {ranks} rank{'s' * (ranks > 1)}"
    )


def as_tree(plan: Plan) -> str:
    """The graph as indented levels, with the fields on the edges."""
    lines = [plan.document.name]
    for number, level in enumerate(plan.graph.levels, 1):
        branch, trunk = ("└─", "   ") if number == len(plan.graph.levels) else ("├─", "│  ")
        lines.append(f"{branch} level {number}")
        for name in level:
            node = plan.graph.nodes[name]
            twig, stem = ("└─", "   ") if name == level[-1] else ("├─", "│  ")
            lines.append(f"{trunk}{twig} {name}  [{node.spec.use}]  pool {plan.pool_of(node)}")
            lines += [f"{trunk}{stem}   ← {source}" for source in _sources(plan, name)]
    return "\n".join(lines)


def _sources(plan: Plan, name: str) -> list[str]:
    """What a node waits for, one line for each node before it."""
    by_source: dict[tuple[str, str], list[str]] = {}
    for edge in plan.graph.edges:
        if edge.target == name:
            by_source.setdefault((edge.source, _kind(edge)), []).append(edge.label)
    return [f"{source}: {kind}{', '.join(labels)}" for (source, kind), labels in sorted(by_source.items())]


def _kind(edge: Edge) -> str:
    if edge.kind == "field":
        return ""
    return "the last step's weights of " if edge.distance else "weights of "


def as_mermaid(plan: Plan) -> str:
    """A mermaid flowchart: field edges solid, weight edges dotted, the edge to the next step thick."""
    lines = ["flowchart LR", f"  {DATA}[({DATA})]"]
    for name in plan.graph.order:
        node = plan.graph.nodes[name]
        lines.append(f'  {name}["{name}<br/><i>{node.spec.use}</i><br/>pool {plan.pool_of(node)}"]')
    grouped: dict[tuple[str, str, str, int], list[str]] = {}
    for edge in plan.graph.edges:
        grouped.setdefault((edge.source, edge.target, edge.kind, edge.distance), []).append(edge.label)
    for (source, target, kind, distance), labels in sorted(grouped.items()):
        label = "<br/>".join(labels) if kind == "field" else f"weights of {labels[0]}"
        if distance:
            lines.append(f'  {source} ==>|"{label}, next step"| {target}')
        else:
            lines.append(f'  {source} {"-->" if kind == "field" else "-.->"}|"{label}"| {target}')
    return "\n".join(lines)


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data for tools: stable keys, no object of ours."""
    batch = plan.document.batch
    return {
        "name": plan.document.name,
        "batch": {"prompts": batch.prompts, "group": batch.group, "samples": plan.num_samples},
        "schedule": plan.document.schedule.mode,
        "levels": [list(level) for level in plan.graph.levels],
        "pools": {
            pool.name: {
                "workers": pool.workers,
                "cpus_per_worker": pool.cpus_per_worker,
                "shared_by": list(pool.logical),
            }
            for pool in plan.pools.values()
        },
        "nodes": {
            name: {
                "use": node.spec.use,
                "pool": plan.pool_of(node),
                "model": node.model,
                "weights": node.weights,
                "reads": [field.name for field in plan.reads(node)],
                "writes": [field.name for field in plan.writes(node)],
            }
            for name, node in ((name, plan.graph.nodes[name]) for name in plan.graph.order)
        },
        "fields": {
            field.name: {
                "type": str(field.type),
                "shape": field.type.shape(batch.prompts, batch.group),
                "writer": field.writer,
                "readers": list(field.readers),
            }
            for field in sorted(plan.graph.fields.values(), key=lambda field: field.name)
        },
        "edges": [
            {"source": e.source, "target": e.target, "kind": e.kind, "label": e.label, "distance": e.distance}
            for e in plan.graph.edges
        ],
    }
