"""The dry run as a page of text: what runs where and in which order, on which fields, and what a step needs.

Details come first and the sums last, where a terminal stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.graph.pools import Pool
from flowrl.graph.show.text import count, human_bytes, human_flops, listed, table, wrapped
from flowrl.graph.sizes.architecture import Unknown
from flowrl.graph.sizes.batches import Generation, Passes, between
from flowrl.graph.sizes.lengths import BYTES_PER_TOKEN, Lengths
from flowrl.graph.sizes.measure import Sizes, measure
from flowrl.graph.sizes.memory import PoolMemory


def as_plan(plan: Plan, lengths: Lengths | None = None) -> str:
    """The dry run; lengths that are not given are assumed, and the page says so."""
    sizes, columns = measure(plan, lengths), _columns(plan)
    parts = [
        [*_header(plan, sizes.lengths)],
        [*_levels(plan)],
        ["pools", *(line for pool in plan.pools.values() for line in _pool_lines(pool, plan))],
        *([*_node_lines(plan, name, columns)] for name in (DATA, *plan.graph.order)),
        [*_fields(plan, sizes)],
        [*_batch(sizes)],
        [*_memory(plan, sizes)],
        [*_compute(sizes)],
        [*_syncs(sizes)],
        [*_saved(plan, sizes)],
        [*_staleness(plan), *_resume(plan)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _header(plan: Plan, lengths: Lengths) -> Iterator[str]:
    document, batch = plan.document, plan.document.batch
    yield (
        f"{document.name}: {batch.prompts} prompts x {batch.group} samples = {plan.num_samples} trajectories a step, "
        f"{document.run.steps} steps, schedule {document.schedule.mode}"
    )
    yield from wrapped(
        f"sizes are for prompts of {lengths.prompt_tokens:,} tokens ({lengths.prompt_reason}) and responses of "
        f"{lengths.response_tokens:,} ({lengths.response_reason}), all equally long; give others by --prompt-tokens N "
        "and --response-tokens N"
    )


def _levels(plan: Plan) -> Iterator[str]:
    yield "execution levels (nodes of one level need not wait for each other)"
    for number, level in enumerate(plan.graph.levels, 1):
        yield from wrapped(f"{number}. {', '.join(level)}", 2, 5)
    for edge in plan.graph.edges:
        if edge.distance:
            when = "next step" if not plan.slack else f"{edge.distance + plan.slack} steps later, at the latest"
            yield f"  {when}: {edge.target} waits for {edge.source} (weights of {edge.label})"


def _pool_lines(pool: Pool, plan: Plan) -> list[str]:
    members = [name for name in plan.graph.order if plan.pool_of(plan.graph.nodes[name]) == pool.name]
    shared = [name for name in pool.logical if name != pool.name]
    also = f", shared by {', '.join(shared)}" if shared else ""
    workers = f"{count(pool.workers, 'worker')} x {pool.cpus_per_worker:g} CPU"
    return wrapped(f"{pool.name}: {workers}{also}; runs {', '.join(members)}", 2, 4)


def _node_lines(plan: Plan, name: str, columns: Mapping[str, str]) -> Iterator[str]:
    """A node with its fields, or the data set with its columns."""
    if name == DATA:
        yield f"{DATA}: the columns of data.train"
        reads, writes = [], [field for field in plan.graph.fields.values() if field.writer == DATA]
    else:
        node = plan.graph.nodes[name]
        level = next(number for number, names in enumerate(plan.graph.levels, 1) if name in names)
        model = f", {node.weights} the weights of model {node.model}" if node.model else ""
        yield f"{name}: {node.spec.use} (level {level}, pool {_home(plan, node)}{model})"
        reads, writes = plan.reads(node), plan.writes(node)
    yield from (f"  reads  {columns[field.name]}  written by {field.writer}" for field in reads)
    if name != DATA and not reads:
        yield "  reads  nothing"
    for field in writes:
        yield f"  writes {columns[field.name]}  next read by {', '.join(field.readers) or 'nobody'}"
    if not writes:
        yield "  writes nothing"


def _home(plan: Plan, node: BoundNode) -> str:
    home = plan.pool_of(node)
    if node.weights == "syncs":
        return " -> ".join([home, *(pool for pool in plan.engine_pools(node.model) if pool != home)])
    return home if node.spec.pool in (None, home) else f"{node.spec.pool} (workers of {home})"


def _columns(plan: Plan) -> dict[str, str]:
    """Name, type and shape of every field, aligned."""
    batch = plan.document.batch
    rows = [(f.name, str(f.type), f.type.shape(batch.prompts, batch.group)) for f in plan.graph.fields.values()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    return {row[0]: "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows}


def _fields(plan: Plan, sizes: Sizes) -> Iterator[str]:
    yield (
        f"columns of a step: at most {human_bytes(sizes.peak_columns)} at a time "
        f"(~ is a text, taken for {BYTES_PER_TOKEN} bytes a token of the prompt or response)"
    )
    order = {name: place for place, name in enumerate((DATA, *plan.graph.order))}
    fields = sorted(plan.graph.fields.values(), key=lambda field: order[field.writer])
    rows = [("field", "type", "bytes", "written by", "read by", "dropped after")]
    for field in fields:
        size = sizes.fields[field.name]
        readers = sorted(field.readers, key=lambda name: order[name])
        rows.append(
            (field.name, str(field.type), ("" if size.exact else "~") + human_bytes(size.num_bytes), field.writer,
             listed(readers) or "nobody", listed(size.released_after) or "never stored")
        )  # fmt: skip
    yield from table(rows, right=(2,))


def _batch(sizes: Sizes) -> Iterator[str]:
    if not sizes.cuts:
        return
    lengths = sizes.lengths
    yield f"batch (rows of {lengths.prompt_tokens:,} + {lengths.response_tokens:,} = {lengths.total:,} tokens)"
    width = max(len(name) for name in sizes.cuts)
    for name, cut in sizes.cuts.items():
        lines = _generation(cut) if isinstance(cut, Generation) else _passes(cut)
        for title, line in zip([name, *[""] * (len(lines) - 1)], lines, strict=True):
            yield f"  {title:<{width}}  {line}"


def _generation(cut: Generation) -> list[str]:
    waves = f"{count(cut.num_waves, 'wave')} of at most {cut.sessions_at_once:,} sessions"
    return [
        f"{count(cut.num_prompts, 'prompt')} ({cut.num_prompts * cut.group:,} sessions) on "
        f"{count(cut.workers, 'worker')}: {between(cut.prompts_per_worker)} prompts each, in {waves}"
    ]


def _passes(cut: Passes) -> list[str]:
    part = f"{count(cut.prompts, 'prompt')} ({cut.rows:,} rows)"
    first = f"{count(cut.num_parts, 'call')} on blocks of {part}"
    if cut.updates:
        steps = count(cut.num_optimizer_steps, "optimizer step")
        batches = count(cut.num_parts, "mini-batch", "mini-batches")
        first = f"{batches} of {part} x {count(cut.epochs, 'epoch')} = {steps}"
    second = f"{cut.rows:,} rows on {count(cut.ranks, 'rank')}: {between(cut.rows_per_rank)} rows each"
    if cut.num_micro_batches is not None:
        second += (
            f", in {count(cut.num_micro_batches, 'micro-batch', 'micro-batches')} of at most "
            f"{count(cut.rows_per_micro_batch or 0, 'row')} ({cut.max_tokens:,} padded tokens)"
        )
    return [first, second] if cut.updates or cut.num_parts > 1 else [second]


def _memory(plan: Plan, sizes: Sizes) -> Iterator[str]:
    if not sizes.memory:
        return
    yield "memory of one worker (not counted: activations, buffers of collectives, the allocator's reserve)"
    for memory in sizes.memory:
        limit = f", {human_bytes(memory.limit)} each" if memory.limit is not None else ""
        yield f"  pool {memory.pool}: {count(plan.pools[memory.pool].workers, 'worker')}{limit}"
        rows = [(s.model, s.what, human_bytes(s.num_bytes), s.how) for s in memory.shares if not s.node]
        rows += [(s.model, s.what, human_bytes(s.num_bytes), f"in {s.node}: {s.how}") for s in memory.shares if s.node]
        rows += [(name, "", "unknown", model.reason) for name, model in memory.unknown.items()]
        if memory.shares:
            rows.append(("peak", "", human_bytes(memory.peak), _peak(memory)))
        yield from table(rows, right=(2,), indent=4)


def _peak(memory: PoolMemory) -> str:
    text = f"{human_bytes(memory.held)} all the time"
    if memory.dearest:
        more = human_bytes(memory.at_work[memory.dearest])
        text += f", {more} more in {memory.dearest} (a worker runs one node at a time)"
    if memory.unknown:
        text += f"; without {listed(list(memory.unknown))}"
    if memory.limit is not None:
        over = ", MORE THAN IT HAS" if memory.peak > memory.limit else ""
        text = f"{memory.peak / memory.limit:.0%} of the worker{over}: {text}"
    return text


def _compute(sizes: Sizes) -> Iterator[str]:
    if not sizes.work:
        return
    yield "compute of a step, all workers together (an update is three forward passes; attention is causal)"
    rows = []
    for work in sizes.work:
        passes = count(work.num_passes, "pass", "passes")
        tokens = f"{passes} over {round(work.num_tokens):,} tokens, {round(work.num_logits):,} of them with logits"
        flops = "unknown" if isinstance(work.flops, Unknown) else human_flops(work.flops)
        rows.append((work.node, work.model, flops, tokens))
    known = [work.flops for work in sizes.work if not isinstance(work.flops, Unknown)]
    if known:
        rows.append(("sum", "", human_flops(sum(known)), "" if len(known) == len(rows) else "of what is known"))
    yield from table(rows, right=(2,))


def _syncs(sizes: Sizes) -> Iterator[str]:
    if not sizes.syncs:
        return
    yield "weight sync"
    for sync in sizes.syncs:
        pools = ", ".join(f"{count(workers, 'worker')} of {pool}" for pool, workers in sync.receivers.items())
        if isinstance(sync.num_bytes, Unknown):
            yield f"  {sync.node}: unknown, for the sizes of model {sync.model} are"
            continue
        total = sync.num_bytes * sum(sync.receivers.values())
        yield f"  {sync.node}: {human_bytes(sync.num_bytes)} to {pools or 'nobody'} = {human_bytes(total)} a sync"


def _saved(plan: Plan, sizes: Sizes) -> Iterator[str]:
    """What `run.prune` has taken out, and what that saves."""
    if plan.whole is None:
        return
    before, whole = measure(plan.whole, sizes.lengths), plan.whole
    gone = [name for name in whole.graph.order if name not in plan.graph.nodes]
    models = [name for name in whole.document.models if name not in plan.document.models]
    yield "pruned (run.prune): nobody needs " + listed([*gone, *(f"model {name}" for name in models)])
    saved = sum(w.flops for w in before.work if isinstance(w.flops, int)) - sum(
        w.flops for w in sizes.work if isinstance(w.flops, int)
    )
    peaks = {memory.pool: memory.peak for memory in sizes.memory}
    yield f"  saves {human_flops(saved)} a step" + "".join(
        f", {human_bytes(memory.peak - peaks.get(memory.pool, 0))} on each worker of {memory.pool}"
        for memory in before.memory
    )


def _staleness(plan: Plan) -> Iterator[str]:
    schedule, prompts = plan.document.schedule, plan.document.batch.prompts
    if schedule.mode == "sync":
        yield "staleness   0 under sync: every token comes from the weights at the start of its step"
        return
    ahead = "max_in_flight"
    if schedule.max_in_flight is None:
        least = f"the smaller of warmup_batches {schedule.warmup_batches} and max_staleness {plan.slack}"
        ahead = f"{prompts:,} x (1 + {least})"
    updates = count(plan.updates_per_sync, "batch", "batches")
    yield f"staleness   a trained token is at most {count(plan.slack, 'version')} old; stale: {schedule.stale}"
    yield f"            a version is a step: {updates} trained, one sync"
    yield f"            {count(plan.document.prompts_in_flight, 'prompt')} in flight: {ahead}"


def _resume(plan: Plan) -> Iterator[str]:
    checkpoint = plan.document.checkpoint
    if checkpoint is None:
        yield "resume      never: without checkpoint: a run starts at step 1"
    else:
        yield (
            f"resume      checkpoints (every {count(checkpoint.every, 'step')}, the last {checkpoint.keep} kept) are "
            "not available in this version: the run starts at step 1"
        )
