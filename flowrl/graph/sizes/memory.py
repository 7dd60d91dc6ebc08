"""Memory that the models of one worker need, from their architectures alone.

Two kinds: what is *held* as long as the worker lives (weights, gradients, optimizer, the engine's copy of the weights),
and what a node needs *while it runs* (KV cache, logits). A worker runs one node at a time, so its peak is all that is
held plus the dearest node. Not counted: activations kept for the backward pass, buffers of collectives, what the
allocator keeps back, the CUDA context (about 0.5 GiB). Source of the bytes per parameter: Rajbhandari et al. 2020,
ZeRO, arXiv:1910.02054, section 3, with everything in float32: 4 weights + 4 gradients + 8 moments of AdamW;
`moments.py` has those of others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from flowrl.graph.bind import BoundNode
from flowrl.graph.pools import Pool, physical_name
from flowrl.graph.sizes import lengths as names
from flowrl.graph.sizes.adapters import ADAPTER_BYTES, num_trained
from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.graph.sizes.batches import Generation, Passes
from flowrl.graph.sizes.lengths import Lengths, StepLengths, holds_engine
from flowrl.graph.sizes.moments import class_of, num_moments
from flowrl.graph.words import count
from flowrl.model import ModelSpec, base_of
from flowrl.spec.document import PoolSpec

GIB = 2**30
WIDTH: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight."""
SCORES_AT_A_TIME = 2**24
"""Logits of response tokens in memory at a time, while log-probabilities are read or trained.

That of `nodes/_backend/chunked.py`; a test compares them."""
LOGIT_BYTES: Mapping[str, int] = {"float32": 8, "bfloat16": 10, "float16": 10}
"""Bytes for each of them: two copies in float32, and what a narrow model puts out. Measured by a test."""
LOGITS_COMPARED_AT_A_TIME = SCORES_AT_A_TIME // 4
"""Where an update compares the logits of its model with those of another; `nodes/_backend/distilling.py`."""
MORE_LOGIT_BYTES_COMPARED = 20
"""Bytes for each of them beside `LOGIT_BYTES`: what softmax and divergence keep for the gradient, and the other's."""
LOGIT_BYTES_OF_SAMPLING = 16
"""Bytes per session and word while a token is drawn: logits, log-softmax, probabilities, their sum, in float32."""


@dataclass(frozen=True)
class Share:
    """Memory of one worker for one purpose."""

    model: str
    what: str
    num_bytes: int
    how: str
    """The arithmetic."""
    node: str = ""
    """Needed only while this node runs; empty for what is held all the time."""
    sharded: bool = False
    """Divided by the workers of the pool."""


@dataclass(frozen=True)
class PoolMemory:
    """Memory of one worker of a pool."""

    pool: str
    limit: int | None
    """Bytes that the models may fill, if the document says so."""
    shares: tuple[Share, ...]
    unknown: Mapping[str, Unknown]
    """Models of the pool whose sizes are unknown, and not counted."""

    @property
    def held(self) -> int:
        """Bytes held all the time."""
        return sum(share.num_bytes for share in self.shares if not share.node)

    @property
    def at_work(self) -> Mapping[str, int]:
        """Bytes that each node needs beside, while it runs."""
        found: dict[str, int] = {}
        for share in self.shares:
            if share.node:
                found[share.node] = found.get(share.node, 0) + share.num_bytes
        return found

    @property
    def dearest(self) -> str:
        """The node that needs most; empty where none needs anything."""
        return max(self.at_work, key=lambda name: self.at_work[name], default="")

    @property
    def peak(self) -> int:
        """Most bytes at a time: all that is held, and the dearest node."""
        return self.held + self.at_work.get(self.dearest, 0)


def model_nodes(pools: Mapping[str, PoolSpec], nodes: Iterable[BoundNode]) -> dict[str, list[BoundNode]]:
    """Nodes that work on a model by the group of workers that they run on; those of unknown pools are left out."""
    found: dict[str, list[BoundNode]] = {}
    for node in nodes:
        home = physical_name(pools, node.pool)
        if home is not None and node.model is not None and node.weights in ("reads", "updates", "generates"):
            found.setdefault(home, []).append(node)
    return found


def held(
    nodes: Iterable[BoundNode], pool: Pool, specs: Mapping[str, ModelSpec], models: Mapping[str, Architecture | Unknown]
) -> Iterator[Share]:
    """What the models of these nodes, all of them of this pool, hold on each of its workers.

    Nodes that train or read a model share one copy of it, and so does the reference of a model trained with LoRA;
    rollouts have a copy in each engine.
    """
    nodes = list(nodes)
    trained = [name for name in specs if any(node.weights == "updates" and node.model == name for node in nodes)]
    for name, spec in specs.items():
        mine, model = [node for node in nodes if node.model == name], models[name]
        beside = any(name in node.also_reads.values() for node in nodes)
        if isinstance(model, Unknown):
            continue
        roles = {node.weights for node in mine} | ({"reads"} if beside else set())
        policy = base_of(name, specs, trained)
        if policy is not None and "reads" in roles:
            yield Share(name, "weights", 0, f"those of {policy}, its adapter off")
        elif roles & {"updates", "reads"}:
            workers = pool.workers if spec.parallel == "fsdp2" else 1
            split = f" / {workers} workers (fsdp2)" if spec.parallel == "fsdp2" else ", whole on each worker (ddp)"
            for what, num, width in _kept(spec, model, "updates" in roles):
                size, how = -(-num // workers) * width, f"{num:,} x {width} B{split}"
                yield Share(name, what, size, how, sharded=spec.parallel == "fsdp2")
            if "updates" in roles and num_moments(spec.optimizer) is None:
                yield Share(name, class_of(spec.optimizer), 0, "not counted: what it keeps is known once it runs")
        engines = {
            tuple(str(getattr(node.node, key, "")) for key in names.ENGINE_SETTINGS): node
            for node in mine
            if holds_engine(node)
        }
        if engines:
            own = [_copy(node, spec, model) for node in engines.values()]
            yield Share(name, "engine", sum(size for size, _ in own), " + ".join(how for _, how in own))


def _kept(spec: ModelSpec, model: Architecture, updates: bool) -> Iterator[tuple[str, int, int]]:
    """What one copy of a model consists of: its name, how many numbers, and the bytes of each."""
    yield "weights", model.num_parameters, WIDTH[spec.dtype]
    if updates:
        num, width = num_trained(model, spec), WIDTH[spec.dtype] if spec.lora is None else ADAPTER_BYTES
        if spec.lora is not None:
            yield "adapter", num, width
        yield "gradients", num, width
        if moments := num_moments(spec.optimizer):
            yield class_of(spec.optimizer), num, width * moments


def _copy(node: BoundNode, spec: ModelSpec, model: Architecture) -> tuple[int, str]:
    """Bytes of the weights in an engine, on each worker that it takes, and the arithmetic."""
    width, workers = width_of_engine(node, spec), node.workers_per_copy
    split = f" / {workers} workers (tensor parallel)" if workers > 1 else ", an engine owns a whole copy"
    return -(-model.num_parameters // workers) * width, f"{model.num_parameters:,} x {width} B{split}"


def width_of_engine(node: BoundNode, spec: ModelSpec) -> int:
    """Bytes of a weight in the engine that generates, which may hold the model in a type of its own."""
    options = getattr(node.node, names.ENGINE_OPTIONS, None)
    own = options.get("dtype") if isinstance(options, Mapping) else None
    return WIDTH.get(str(own), WIDTH[spec.dtype])


def kv_cache(node: BoundNode, spec: ModelSpec, model: Architecture, num_sessions: int, lengths: Lengths) -> Share:
    """Keys and values of sessions at full length, each with a copy of its prompt of its own.

    An upper bound: sessions of a group share the prompt until they draw different tokens.
    """
    width, tokens = width_of_engine(node, spec), num_sessions * lengths.total
    how = (
        f"{count(num_sessions, 'session')} x {count(lengths.total, 'token')} x 2 x "
        f"{count(model.num_layers, 'layer')} x {count(model.num_kv_heads, 'head')} x {model.head_dim} x {width} B"
    )
    num_bytes = -(-tokens * model.kv_values_per_token // node.workers_per_copy) * width
    how += f" / {node.workers_per_copy} workers" * (node.workers_per_copy > 1)
    return Share(node.model or "", "KV cache", num_bytes, how, node.name)


def logits(
    node: BoundNode, spec: ModelSpec, model: Architecture, cut: Generation | Passes, lengths: Lengths
) -> Share | None:
    """Scores of all words for the tokens that are computed at a time; None where nobody says how many.

    None for values too: one number for each token is nothing.
    """
    if model.value_head:
        return None
    words = model.vocabulary
    if isinstance(cut, Generation):
        num, width = cut.sessions_at_once, LOGIT_BYTES_OF_SAMPLING
        how = f"{count(num, 'session')} x vocabulary {words:,} x {width} B"
        return Share(node.model or "", "logits", num * words * width, how, node.name)
    if cut.rows_per_micro_batch is None:
        return None
    tokens, width = cut.rows_per_micro_batch * lengths.response_tokens, LOGIT_BYTES[spec.dtype]
    width += MORE_LOGIT_BYTES_COMPARED * bool(node.also_reads)
    most = LOGITS_COMPARED_AT_A_TIME if node.also_reads else SCORES_AT_A_TIME
    num_parts = -(-tokens // max(1, most // words))
    at_a_time = -(-tokens // num_parts)
    how = f"{count(at_a_time, 'token')} at a time x vocabulary {words:,} x {width} B"
    return Share(node.model or "", "logits", at_a_time * words * width, how, node.name)


def pool_memory(
    pool: Pool,
    limit: float | None,
    nodes: Iterable[BoundNode],
    specs: Mapping[str, ModelSpec],
    models: Mapping[str, Architecture | Unknown],
    cuts: Mapping[str, Generation | Passes],
    lengths: StepLengths,
) -> PoolMemory:
    """Memory of one worker of a pool on which these nodes work with models; `limit` is in GiB."""
    nodes = list(nodes)
    shares = list(held(nodes, pool, specs, models))
    unknown: dict[str, Unknown] = {}
    for node in nodes:
        name = node.model or ""
        model, spec = models[name], specs[name]
        if isinstance(model, Unknown):
            unknown[name] = model
        elif node.weights != "generates" or holds_engine(node):
            cut, own = cuts[node.name], lengths.of(node.name)
            if isinstance(cut, Generation):
                shares.append(kv_cache(node, spec, model, cut.sessions_at_once, own))
            scores = logits(node, spec, model, cut, own)
            shares += [scores] if scores is not None else []
    return PoolMemory(pool.name, None if limit is None else int(Fraction(limit) * GIB), tuple(shares), unknown)
