"""How large a step is: lengths, bytes of the fields, batch arithmetic, memory, bytes of a weight sync, FLOPs.

Pure functions of a plan and of the lengths of its rows. The bytes of a field are those of its Arrow columns
(`flowrl.wire`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from flowrl.fields import Dtype, FieldType
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.graph.sizes.batches import Generation, Passes, generations, passes
from flowrl.graph.sizes.flops import Work, work_of_passes, work_of_rollout
from flowrl.graph.sizes.lengths import BYTES_PER_TOKEN, Lengths, StepLengths, assume, holds_engine
from flowrl.graph.sizes.memory import WIDTH, PoolMemory, model_nodes, pool_memory, width_of_engine
from flowrl.graph.sizes.model_config import architectures

BITS: Mapping[Dtype, int] = {"int": 64, "float": 32, "bool": 1}
"""Width of a value; a text has offsets and bytes."""
OFFSET, INDEX = 8, 4
"""Bytes of the offset of a list or of a text, and of the index that says which prompt a trajectory has."""
SHORT_TEXTS = ("finish_reason", "data_source")
"""Outputs and columns that by convention hold a word, however long the prompt or the response is."""
BYTES_PER_WORD = 6
"""Bytes of such a text: `stop` has 4, `length` has 6."""


@dataclass(frozen=True)
class FieldSize:
    """A field of the plan and how long its bytes are kept."""

    name: str
    num_bytes: int
    exact: bool
    """False where the length of a text is assumed."""
    released_after: tuple[str, ...]
    """The last of its readers; empty for a field that nobody reads, which is never stored."""
    last_level: int
    """The level of those."""


@dataclass(frozen=True)
class SyncSize:
    """Bytes of the weights that one sync sends."""

    node: str
    model: str
    num_bytes: int | Unknown
    """Of one copy of the weights, in the type of the engine that takes them; the widest where there are several."""
    receivers: Mapping[str, int]
    """Workers that take a copy, by pool."""


@dataclass(frozen=True)
class Sizes:
    """Everything that a dry run says in numbers."""

    lengths: StepLengths
    models: Mapping[str, Architecture | Unknown]
    fields: Mapping[str, FieldSize]
    cuts: Mapping[str, Generation | Passes]
    memory: tuple[PoolMemory, ...]
    """Of pools that work with models."""
    syncs: tuple[SyncSize, ...]
    work: tuple[Work, ...]
    """Of nodes that compute with a model, in plan order."""
    average_flops: int
    """Operations of a step, over all nodes whose models are known; of one that runs every k-th step, a k-th of its."""
    peak_columns: int
    """Bytes of the columns that are needed at the same time, at most; nodes of one level count as running at once."""


def lengths_of(plan: Plan, prompt_tokens: int | None = None, response_tokens: int | None = None) -> StepLengths:
    """The lengths given; one that is not is assumed from the plan (see `flowrl.graph.sizes.lengths.assume`)."""
    return assume(plan.graph, architectures(plan.document.models.items()), prompt_tokens, response_tokens)


def measure(plan: Plan, lengths: StepLengths | None = None) -> Sizes:
    """The sizes of a plan, for rows of these lengths."""
    models = architectures(plan.document.models.items())
    lengths = lengths or assume(plan.graph, models)
    cuts: dict[str, Generation | Passes] = {**generations(plan), **passes(plan, lengths)}
    fields = field_sizes(plan, lengths)
    memory = tuple(_memory(plan, models, cuts, lengths))
    work = tuple(_work(plan, models, cuts, lengths))
    trained = [name for name in plan.graph.order if name not in plan.graph.only_validated]
    every = {name: node.spec.every for name, node in plan.graph.nodes.items()}
    average = round(sum(Fraction(each.flops, every[each.node]) for each in work if isinstance(each.flops, int)))
    return Sizes(
        lengths, models, fields, {name: cuts[name] for name in trained if name in cuts}, memory,
        tuple(_syncs(plan, models)), work, average, _peak_columns(plan, fields),
    )  # fmt: skip


def field_bytes(type_: FieldType, num_prompts: int, group: int, lengths: Lengths, *, is_word: bool = False) -> int:
    """Bytes of a field's columns for P prompts of n samples, all of them settled.

    A text is as long as the prompt (one per prompt) or the response (one per trajectory), `BYTES_PER_TOKEN` a token,
    unless it `is_word`; one per token has as many bytes, one per step is taken for empty.
    """
    rows = num_prompts * group
    num_values = {
        "Step": 1,
        "Prompt": num_prompts,
        "Sample": rows,
        "PromptToken": num_prompts * lengths.prompt_tokens,
        "Token": rows * lengths.response_tokens,
    }[type_.axis]
    structure = 0
    if type_.axis == "Token":
        structure = OFFSET * (rows + 1)
    elif type_.axis == "PromptToken":  # distinct prompts, and for each trajectory which of them it has
        structure = OFFSET * (num_prompts + 1) + INDEX * rows
    if type_.dtype in BITS:
        return structure + -(-num_values * BITS[type_.dtype] // 8)
    tokens = {"Prompt": lengths.prompt_tokens, "Sample": lengths.response_tokens, "Step": 0}.get(type_.axis, 1)
    width = BYTES_PER_WORD if is_word else tokens * BYTES_PER_TOKEN
    return structure + OFFSET * (num_values + 1) + num_values * width


def field_sizes(plan: Plan, lengths: StepLengths) -> dict[str, FieldSize]:
    """Bytes of every field, and which readers it is kept for."""
    batch, level, found = plan.document.batch, _levels(plan), {}
    ports = {field: port for node in plan.graph.nodes.values() for port, field in node.writes.items()}
    for name, field in plan.graph.fields.items():
        is_word = ports.get(name, name) in SHORT_TEXTS
        num_bytes = field_bytes(
            field.type, batch.prompts, plan.sessions[field.writer], lengths.of(field.writer), is_word=is_word
        )
        readers = [reader for reader in plan.readers(field) if reader not in plan.graph.only_validated]
        at = {reader: level.get(reader, level[field.writer]) for reader in readers}  # a gate is read when it is written
        last = tuple(reader for reader in readers if at[reader] == max(at.values()))
        found[name] = FieldSize(name, num_bytes, field.type.dtype in BITS, last, max(at.values(), default=0))
    return found


def _levels(plan: Plan) -> dict[str, int]:
    return {name: number for number, level in enumerate(plan.graph.levels, 1) for name in level} | {DATA: 0}


def _peak_columns(plan: Plan, fields: Mapping[str, FieldSize]) -> int:
    level = _levels(plan)
    change = [0] * (len(plan.graph.levels) + 2)
    for name, size in fields.items():
        if size.released_after:
            change[level[plan.graph.fields[name].writer]] += size.num_bytes
            change[size.last_level + 1] -= size.num_bytes
    peak = now = 0
    for step in change:
        now += step
        peak = max(peak, now)
    return peak


def _memory(
    plan: Plan,
    models: Mapping[str, Architecture | Unknown],
    cuts: Mapping[str, Generation | Passes],
    lengths: StepLengths,
) -> list[PoolMemory]:
    document = plan.document
    return [
        pool_memory(
            plan.pools[pool], document.pools[pool].memory_per_worker if pool in document.pools else None, nodes,
            document.models, models, cuts, lengths,
        )
        for pool, nodes in model_nodes(document.pools, (plan.graph.nodes[name] for name in plan.graph.order)).items()
    ]  # fmt: skip


def _syncs(plan: Plan, models: Mapping[str, Architecture | Unknown]) -> list[SyncSize]:
    found = []
    for name in plan.graph.order:
        node = plan.graph.nodes[name]
        if node.weights != "syncs" or node.model is None:
            continue
        model, spec = models[node.model], plan.document.models[node.model]
        engines = [one for one in plan.graph.nodes.values() if one.model == node.model and holds_engine(one)]
        width = max((width_of_engine(one, spec) for one in engines), default=WIDTH[spec.dtype])  # cast, then sent
        receivers = {pool: plan.pools[pool].workers for pool in plan.engine_pools(node.model)}
        size = model if isinstance(model, Unknown) else model.num_parameters * width
        found.append(SyncSize(name, node.model, size, receivers))
    return found


def _work(
    plan: Plan,
    models: Mapping[str, Architecture | Unknown],
    cuts: Mapping[str, Generation | Passes],
    lengths: StepLengths,
) -> list[Work]:
    batch, found = plan.document.batch, []
    for name, cut in ((name, cuts[name]) for name in plan.graph.order if name in cuts):
        node = plan.graph.nodes[name]
        if name in plan.graph.only_validated:
            continue  # on how many rows is known when the data is
        assert node.model is not None, "a node that works on weights names a model"
        model, own = models[node.model], lengths.of(name)
        if isinstance(cut, Passes):
            adapters = plan.document.models[node.model].lora is not None
            beside = [models[name] for name in node.also_reads.values()]
            found.append(work_of_passes(cut, node.model, model, own, adapters, beside))
        elif holds_engine(node):
            found.append(work_of_rollout(name, node.model, model, batch.prompts, node.sessions, own))
    return found
