"""FR055: whether the models of a pool fit into the memory that the document says a worker has.

Only what is certain is counted: weights, gradients, optimizer, engines, and one session's keys and values. What follows
from more is the dry run's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flowrl.errors import Problem
from flowrl.graph.bind import BoundNode
from flowrl.graph.pools import Pool
from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.graph.sizes.lengths import Lengths, assume, holds_engine
from flowrl.graph.sizes.memory import GIB, Share, held, kv_cache, model_nodes
from flowrl.graph.sizes.model_config import architectures
from flowrl.graph.subject import Subject
from flowrl.model import ModelSpec


@dataclass(frozen=True)
class _Worker:
    """One worker of a pool, with the nodes that work on models there."""

    pool: Pool
    limit: float
    """Bytes."""
    nodes: tuple[BoundNode, ...]
    specs: Mapping[str, ModelSpec]
    models: Mapping[str, Architecture | Unknown]
    lengths: Lengths

    def shares(self) -> list[Share]:
        """What is certain to be needed at the same time."""
        found = list(held(self.nodes, self.pool, self.specs, self.models))
        caches = []
        for node in self.nodes:
            model = self.models.get(node.model or "")
            if holds_engine(node) and isinstance(model, Architecture):
                caches.append(kv_cache(node, self.specs[node.model or ""], model, 1, self.lengths))
        return found + sorted(caches, key=lambda share: share.num_bytes)[-1:]

    @property
    def num_bytes(self) -> int:
        """Bytes of them all."""
        return sum(share.num_bytes for share in self.shares())

    @property
    def fits(self) -> bool:
        """Whether they are no more than the worker has."""
        return self.num_bytes <= self.limit


def does_not_fit(subject: Subject) -> Iterator[Problem]:
    """FR055: the models of a pool need more memory than a worker has."""
    document, broken = subject.document, subject.reading.is_broken
    limited = {name: pool.memory_per_worker for name, pool in document.pools.items() if pool.memory_per_worker}
    if not limited or broken(("pools",)) or broken(("models",)):
        return
    specs = {name: spec for name, spec in document.models.items() if not _is_broken(subject, ("models", name))}
    nodes = [node for node in subject.nodes if not _is_broken(subject, ("nodes", node.name))]
    models = architectures(specs.items())
    lengths = assume(nodes, models)
    for name, found in model_nodes(document.pools, nodes).items():
        if name not in limited or _is_broken(subject, ("pools", name)):
            continue
        spec = document.pools[name]
        pool = Pool(name, spec.workers, 0.0, True, (), {})
        used = tuple(node for node in found if node.model in specs)
        worker = _Worker(pool, (limited[name] or 0.0) * GIB, used, specs, models, lengths)
        if not worker.fits:
            yield Problem("FR055", subject.place("pools", name, "memory_per_worker"),
                          f"the models of pools.{name} need at least {_gib(worker.num_bytes)} GiB on each worker, "
                          f"which has {limited[name]:g} GiB", _fix(worker), tuple(_sums(worker)))  # fmt: skip


def _is_broken(subject: Subject, path: tuple[str, ...]) -> bool:
    """Whether anything in this section was refused: sizes that follow from a stand-in are worth nothing."""
    return any(other[: len(path)] == path or path[: len(other)] == other for other in subject.reading.broken)


def _sums(worker: _Worker) -> Iterator[str]:
    """The arithmetic: a line for each purpose, and the sum."""
    shares = worker.shares()
    for share in shares:
        yield f"{share.model} {share.what} {_gib(share.num_bytes)} GiB: {share.how}"
    parts = " + ".join(_gib(share.num_bytes) for share in shares)
    yield f"{parts} = {_gib(worker.num_bytes)} GiB of {worker.limit / GIB:g} GiB"


def _fix(worker: _Worker) -> str:
    """What would make it fit: each change that is enough alone, else all of them together; or more workers."""
    changes = (_sharded, _narrow, _apart)
    single = [found for found in (change(worker) for change in changes) if found is not None]
    ways = [f"{text}: {_gib(changed.num_bytes)} GiB" for text, changed in single if changed.fits]
    together, texts = worker, []
    for change in changes:
        found = change(together)
        if found is not None:
            texts.append(found[0])
            together = found[1]
    if not ways and together.fits:
        ways.append(f"{' and '.join(texts)}: {_gib(together.num_bytes)} GiB")
    more = _more_workers(worker)
    if not ways and not more and (together_more := _more_workers(together)):
        ways.append(" and ".join([*texts, together_more]))
    ways += [more] if more else []
    if ways:
        return "; or ".join(ways)
    whole = max(worker.shares(), key=lambda share: share.num_bytes * (not share.sharded))
    need = f"the {whole.what} of {whole.model} alone needs {_gib(whole.num_bytes)} GiB on one worker"
    return f"a smaller model, or workers with more memory: {need}"


def _sharded(worker: _Worker) -> tuple[str, _Worker] | None:
    """All models divided over the workers of the pool."""
    whole = {share.model for share in worker.shares() if share.what == "weights" and not share.sharded}
    if not whole or worker.pool.workers == 1:
        return None
    text = ", ".join(f"models.{name}.parallel: fsdp2" for name in sorted(whole))
    specs = {n: s.model_copy(update={"parallel": "fsdp2"}) if n in whole else s for n, s in worker.specs.items()}
    return f"{text} over {worker.pool.workers} workers", replace(worker, specs=specs)


def _narrow(worker: _Worker) -> tuple[str, _Worker] | None:
    """Frozen models in two bytes a weight."""
    wide = {
        share.model
        for share in worker.shares()
        if not worker.specs[share.model].trainable and worker.specs[share.model].dtype == "float32"
    }
    if not wide:
        return None
    specs = {n: s.model_copy(update={"dtype": "bfloat16"}) if n in wide else s for n, s in worker.specs.items()}
    return ", ".join(f"models.{name}.dtype: bfloat16" for name in sorted(wide)), replace(worker, specs=specs)


def _apart(worker: _Worker) -> tuple[str, _Worker] | None:
    """Rollouts on workers of their own, of the same size."""
    rollouts = tuple(node for node in worker.nodes if node.weights == "generates")
    others = tuple(node for node in worker.nodes if node.weights != "generates")
    if not rollouts or not others:
        return None
    parts = (replace(worker, nodes=rollouts), replace(worker, nodes=others))
    names = ", ".join(node.name for node in rollouts)
    return f"a pool of its own for {names}", max(parts, key=lambda part: part.num_bytes)


def _more_workers(worker: _Worker) -> str:
    """How many workers it takes, where models are divided over them; empty where no number is enough."""
    specs = {name: spec.model_copy(update={"parallel": "fsdp2"}) for name, spec in worker.specs.items()}
    divided = replace(worker, specs=specs, pool=replace(worker.pool, workers=1))
    whole = sum(share.num_bytes for share in divided.shares() if not share.sharded)
    parts = sum(share.num_bytes for share in divided.shares() if share.sharded)
    if not parts or whole >= worker.limit:
        return ""
    num = -(-parts // max(1, int(worker.limit - whole)))
    if num <= worker.pool.workers:
        return ""
    how = "" if specs == worker.specs else " with parallel: fsdp2"
    return f"at least {num} workers{how}"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"
