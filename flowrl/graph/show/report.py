"""The dry run as a page of text: what runs where and in which order, on which fields, and what a step needs.

Details come first and the sums last, where a terminal stops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.graph.pools import Pool
from flowrl.graph.show.adapters import adapter_lines
from flowrl.graph.show.text import gate_in_words, human_bytes, human_flops, listed, table, when_in_words, wrapped
from flowrl.graph.sizes.architecture import Unknown
from flowrl.graph.sizes.batches import Generation, Passes
from flowrl.graph.sizes.lengths import BYTES_PER_TOKEN, Lengths, StepLengths
from flowrl.graph.sizes.measure import Sizes, lengths_of, measure
from flowrl.graph.sizes.memory import PoolMemory
from flowrl.graph.words import between, count, ordinal
from flowrl.spec.document import AsyncSchedule


def as_plan(plan: Plan, lengths: StepLengths | None = None) -> str:
    """The dry run; lengths that are not given are assumed, and the page says so."""
    sizes, columns = measure(plan, lengths), _columns(plan)
    parts = [
        [*_header(plan, sizes.lengths)],
        [*_levels(plan)],
        ["pools", *(line for pool in plan.pools.values() for line in _pool_lines(pool, plan))],
        *([*_node_lines(plan, name, columns)] for name in (DATA, *plan.graph.order)),
        [*_fields(plan, sizes)],
        [*_batch(sizes)],
        [*adapter_lines(plan, sizes)],
        [*_memory(plan, sizes)],
        [*_compute(plan, sizes)],
        [*_syncs(sizes)],
        [*_saved(plan, sizes)],
        [*_staleness(plan), *_resume(plan)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _header(plan: Plan, lengths: StepLengths) -> Iterator[str]:
    document, batch = plan.document, plan.document.batch
    yield (
        f"{document.name}: {count(batch.prompts, 'prompt')} x {count(batch.group, 'sample')} = "
        f"{count(plan.num_samples, 'trajectory', 'trajectories')} a step, {count(document.run.steps, 'step')}, "
        f"schedule {document.schedule.mode}"
    )
    rows = _by_rows(lengths)
    said = "; ".join(
        f"prompts of {count(own.prompt_tokens, 'token')} ({own.prompt_reason}) and responses of "
        f"{own.response_tokens:,} ({own.response_reason})" + f" in the rows of {listed(names)}" * (len(rows) > 1)
        for own, names in rows.items()
    )
    said += ", all equally long" * (len(rows) == 1)
    yield from wrapped(f"sizes are for {said}; give others by --prompt-tokens N and --response-tokens N")
    for own in rows:
        if own.too_long:
            yield from wrapped(f"WARNING: rows of {_tokens(own)} tokens are {own.too_long}: a run could not take them")


def _by_rows(lengths: StepLengths) -> dict[Lengths, list[str]]:
    """The rollouts whose rows are assumed to be as long as this, longest first."""
    found: dict[Lengths, list[str]] = {lengths.longest: []}
    for name, own in lengths.rollouts.items():
        alike = next((other for other in found if _tokens(other) == _tokens(own)), own)
        found.setdefault(alike, []).append(name)
    return dict(sorted(found.items(), key=lambda item: -item[0].total))


def _tokens(own: Lengths) -> str:
    return f"{own.prompt_tokens:,} + {own.response_tokens:,} = {own.total:,}"


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
    workers += f", {count(pool.threads_per_worker, 'thread')} each" if pool.threads_per_worker else ""
    return wrapped(f"{pool.name}: {workers}{also}; runs {', '.join(members)}", 2, 4)


def _node_lines(plan: Plan, name: str, columns: Mapping[str, str]) -> Iterator[str]:
    """A node with its fields, or the data set with its columns."""
    if name == DATA:
        yield f"{DATA}: the columns of data.train ({plan.document.data['train'].about})"
        columns_of_train = plan.document.data["train"].field_types()
        of_data = [field for field in plan.graph.fields.values() if field.writer == DATA]
        reads, writes = [], [field for field in of_data if not columns_of_train or field.name in columns_of_train]
    else:
        node = plan.graph.nodes[name]
        level = next(number for number, names in enumerate(plan.graph.levels, 1) if name in names)
        model = f", {node.weights} the weights of model {node.model}" if node.model else ""
        yield f"{name}: {node.use} (level {level}, pool {_home(plan, node)}{model})"
        if node.spec.gate is not None:
            yield f"  gate {gate_in_words(node, plan.document.batch.prompts)}"
        yield from (f"  {line}" for line in when_in_words(plan, node))
        reads, writes = plan.reads(node), plan.writes(node)
    yield from (f"  reads  {columns[field.name]}  written by {field.writer}" for field in reads)
    if name != DATA and not reads:
        yield "  reads  nothing"
    for field in writes:
        yield f"  writes {columns[field.name]}  next read by {', '.join(plan.readers(field)) or 'nobody'}"
    if not writes:
        yield "  writes nothing"


def _home(plan: Plan, node: BoundNode) -> str:
    home = plan.pool_of(node)
    if node.weights == "syncs":
        return " -> ".join([home, *(pool for pool in plan.engine_pools(node.model) if pool != home)])
    return home if node.spec.pool in (None, home) else f"{node.spec.pool} (workers of {home})"


def _columns(plan: Plan) -> dict[str, str]:
    """Name, type and shape of every field, aligned."""
    rows = [(f.name, str(f.type), plan.shape(f)) for f in plan.graph.fields.values()]
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
        stored = "in validation" if field.readers else "never stored"
        readers = sorted(plan.readers(field), key=lambda name: order.get(name, len(order)))
        rows.append(
            (field.name, str(field.type), ("" if size.exact else "~") + human_bytes(size.num_bytes), field.writer,
             listed(readers) or "nobody", listed(size.released_after) or stored)
        )  # fmt: skip
    yield from table(rows, right=(2,))


def _batch(sizes: Sizes) -> Iterator[str]:
    if not sizes.cuts:
        return
    rows = _by_rows(sizes.lengths)
    said = (f"{_tokens(own)} tokens" + f" of {listed(names)}" * (len(rows) > 1) for own, names in rows.items())
    yield f"batch (rows of {'; '.join(said)})"
    width = max(len(name) for name in sizes.cuts)
    for name, cut in sizes.cuts.items():
        lines = _generation(cut) if isinstance(cut, Generation) else _passes(cut)
        for title, line in zip([name, *[""] * (len(lines) - 1)], lines, strict=True):
            yield f"  {title:<{width}}  {line}"


def _generation(cut: Generation) -> list[str]:
    waves = f"{count(cut.num_waves, 'wave')} of at most {count(cut.sessions_at_once, 'session')}"
    return [
        f"{count(cut.num_prompts, 'prompt')} ({count(cut.num_prompts * cut.group, 'session')}) on "
        f"{count(cut.workers, 'worker')}: {between(cut.prompts_per_worker, 'prompt')} each, in {waves}"
    ]


def _passes(cut: Passes) -> list[str]:
    part = f"{count(cut.prompts, 'prompt')} ({count(cut.rows, 'row')})"
    first = f"{count(cut.num_parts, 'call')} on blocks of {part}"
    if cut.updates:
        steps = count(cut.num_optimizer_steps, "optimizer step")
        batches = count(cut.num_parts, "mini-batch", "mini-batches")
        first = f"{batches} of {part} x {count(cut.epochs, 'epoch')} = {steps}"
    second = f"{count(cut.rows, 'row')} on {count(cut.ranks, 'rank')}: {between(cut.rows_per_rank, 'row')} each"
    if cut.max_tokens is not None:
        second += (
            f", in {count(cut.num_micro_batches or 0, 'micro-batch', 'micro-batches')} of at most "
            f"{count(cut.rows_per_micro_batch or 0, 'row')} ({count(cut.max_tokens, 'padded token')})"
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
        if not rows:
            yield "    nothing: no node here holds weights"
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


def _compute(plan: Plan, sizes: Sizes) -> Iterator[str]:
    if not sizes.work:
        return
    yield "compute of a step, all workers together (an update is three forward passes; attention is causal)"
    if plan.gate is not None:
        yield "  what the gate runs again is counted once: nobody knows how often"
    if plan.graph.only_validated:
        yield "  what a validation runs is not counted"
    rows = []
    for work in sizes.work:
        node = plan.graph.nodes[work.node]
        every = node.spec.every
        tokens = f"{count(work.num_passes, 'pass', 'passes')} over {count(work.num_tokens, 'token')}, "
        wanted = "logits" if node.cls.head == "lm" else "a value"
        tokens += f"{work.num_logits:,} of them with {wanted}"
        tokens += "".join(f"; and forward through {name}" for name in node.also_reads.values())
        tokens += f"; every {ordinal(every)} step: 1/{every:,} in the sum" if every > 1 else ""
        flops = "unknown" if isinstance(work.flops, Unknown) else human_flops(work.flops)
        rows.append((work.node, work.model, flops, tokens))
    unknown = [work for work in sizes.work if isinstance(work.flops, Unknown)]
    if len(unknown) < len(rows):
        rows.append(("sum", "", human_flops(sizes.average_flops), "of what is known" if unknown else ""))
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
    whole = plan.whole
    before = measure(whole, lengths_of(whole, *sizes.lengths.given))
    gone = [name for name in whole.graph.order if name not in plan.graph.nodes]
    models = [name for name in whole.document.models if name not in plan.document.models]
    yield "pruned (run.prune): nobody needs " + listed([*gone, *(f"model {name}" for name in models)])
    flops, peaks = before.average_flops - sizes.average_flops, {memory.pool: memory.peak for memory in sizes.memory}
    saved = [f"{human_flops(flops)} a step"] if flops else []
    for memory in before.memory:
        if memory.peak > peaks.get(memory.pool, 0):
            saved.append(f"{human_bytes(memory.peak - peaks.get(memory.pool, 0))} on each worker of {memory.pool}")
    yield f"  saves {', '.join(saved) or 'nothing measurable'}"


def _staleness(plan: Plan) -> Iterator[str]:
    schedule, prompts = plan.document.schedule, plan.document.batch.prompts
    if not isinstance(schedule, AsyncSchedule):
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
        how = {"auto": "a run that did not finish is gone on with", "never": "every run starts at step 1"}
        yield f"checkpoint  every {count(checkpoint.every, 'step')} and at the last one; {checkpoint.keep} kept"
        yield f"resume      {checkpoint.resume}: {how.get(checkpoint.resume, 'the run to go on from')}"
