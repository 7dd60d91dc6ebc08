"""FR055: whether the models of a pool fit into the memory that the document says a worker has.

Only what is certain is counted: weights, gradients, optimizer, engines, and one session's keys and values. What follows
from more is the dry run's to say. No way out is offered that was not tried: after it, every pool fits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import ceil

from flowrl.errors import Problem
from flowrl.graph.bind import BoundNode
from flowrl.graph.pools import Pool
from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.graph.sizes.lengths import StepLengths, assume, holds_engine
from flowrl.graph.sizes.memory import GIB, Share, held, kv_cache, model_nodes
from flowrl.graph.sizes.model_config import architectures
from flowrl.graph.subject import Subject
from flowrl.graph.words import count
from flowrl.model import ModelSpec

_MOST_WORKERS = 100_000
"""Advice that takes more is none."""


@dataclass(frozen=True)
class _Worker:
    """One worker of a pool, with the nodes that work on models there."""

    pool: Pool
    limit: float
    """Bytes."""
    nodes: tuple[BoundNode, ...]
    specs: Mapping[str, ModelSpec]
    models: Mapping[str, Architecture | Unknown]
    lengths: StepLengths
    stay: frozenset[str]
    """Rollouts that the schedule wants on the workers of their model's update."""

    def shares(self) -> list[Share]:
        """What is certain to be needed at the same time."""
        found = list(held(self.nodes, self.pool, self.specs, self.models))
        caches = []
        for node in self.nodes:
            model = self.models.get(node.model or "")
            if holds_engine(node) and isinstance(model, Architecture):
                caches.append(kv_cache(node, self.specs[node.model or ""], model, 1, self.lengths.of(node.name)))
        return found + sorted(caches, key=lambda share: share.num_bytes)[-1:]

    @property
    def num_bytes(self) -> int:
        """Bytes of them all."""
        return sum(share.num_bytes for share in self.shares())

    @property
    def fits(self) -> bool:
        """Whether they are no more than the worker has."""
        return self.num_bytes <= self.limit


_Change = Callable[[_Worker], tuple[str, tuple[_Worker, ...]] | None]
"""What to write, and the pools that come of it; None where there is nothing to change."""


def does_not_fit(subject: Subject) -> Iterator[Problem]:
    """FR055: the models of a pool need more memory than a worker has."""
    document, broken = subject.document, subject.reading.is_broken
    limited = {name: pool.memory_per_worker for name, pool in document.pools.items() if pool.memory_per_worker}
    if not limited or broken(("pools",)) or broken(("models",)):
        return
    specs = {name: spec for name, spec in document.models.items() if not _is_broken(subject, ("models", name))}
    nodes = [node for node in subject.nodes if not _is_broken(subject, ("nodes", node.name))]
    models = architectures(specs.items())
    lengths = assume(subject.graph, models)
    for name, found in model_nodes(document.pools, nodes).items():
        if name not in limited or _is_broken(subject, ("pools", name)):
            continue
        pool = Pool(name, document.pools[name].workers, 0.0, True, (), {})
        used = tuple(node for node in found if node.model in specs)
        worker = _Worker(pool, (limited[name] or 0.0) * GIB, used, specs, models, lengths, _staying(subject))
        if not worker.fits:
            yield Problem("FR055", subject.place("pools", name, "memory_per_worker"),
                          f"the models of pools.{name} need at least {_gib(worker.num_bytes)} GiB on each worker, "
                          f"which has {limited[name]:g} GiB", _fix(worker), tuple(_sums(worker)))  # fmt: skip


def _is_broken(subject: Subject, path: tuple[str, ...]) -> bool:
    """Whether anything in this section was refused: sizes that follow from a stand-in are worth nothing."""
    return any(other[: len(path)] == path or path[: len(other)] == other for other in subject.reading.broken)


def _staying(subject: Subject) -> frozenset[str]:
    """Rollouts that FR071 would refuse on a pool of their own."""
    if not subject.document.schedule.together:
        return frozenset()
    trained = {node.model for node in subject.nodes if node.weights == "updates"}
    return frozenset(node.name for node in subject.nodes if node.weights == "generates" and node.model in trained)


def _sums(worker: _Worker) -> Iterator[str]:
    """The arithmetic: a line for each purpose, and the sum; then what it assumes."""
    shares = worker.shares()
    for share in shares:
        yield f"{share.model} {share.what} {_gib(share.num_bytes)} GiB: {share.how}"
    parts = " + ".join(_gib(share.num_bytes) for share in shares)
    yield f"{parts} = {_gib(worker.num_bytes)} GiB of {worker.limit / GIB:g} GiB"
    for name in (share.node for share in shares if share.node):
        own = worker.lengths.of(name)
        yield (
            f"a session of {name} has a prompt of {count(own.prompt_tokens, 'token')} ({own.prompt_reason}) and a "
            f"response of {own.response_tokens:,} ({own.response_reason})"
        )


def _fix(worker: _Worker) -> str:
    """What would make it fit: as few changes as are enough, or more workers, alone or after changes."""
    ways: list[str] = []
    for tried in _fewest_first((_sharded, _narrow, _apart)):
        found = _after(worker, tried)
        if found is not None and not (ways and len(tried) > 1):
            text, pools = found
            if all(pool.fits for pool in pools):
                ways.append(f"{text}: {_gib(max(pool.num_bytes for pool in pools))} GiB")
    more = _more_workers((worker,))
    if not ways and not more:
        changed = (found for tried in _fewest_first((_narrow, _apart)) if (found := _after(worker, tried)))
        more = next((f"{text} and {num}" for text, pools in changed if (num := _more_workers(pools))), "")
    ways += [more] if more else []
    if ways:
        return "; or ".join(ways)
    dearest = max(worker.shares(), key=lambda share: share.num_bytes * (not share.sharded))
    return (
        f"a smaller model, or workers with at least {ceil(worker.num_bytes / GIB):,} GiB: "
        f"the {dearest.what} of {dearest.model} alone needs {_gib(dearest.num_bytes)} GiB on one worker"
    )


def _fewest_first(changes: tuple[_Change, ...]) -> Iterator[tuple[_Change, ...]]:
    return (chosen for size in range(1, len(changes) + 1) for chosen in combinations(changes, size))


def _after(worker: _Worker, changes: Iterable[_Change]) -> tuple[str, tuple[_Worker, ...]] | None:
    """One change after the other, each on all pools that the last one left; None where one of them changes nothing."""
    texts: list[str] = []
    pools: tuple[_Worker, ...] = (worker,)
    for change in changes:
        found = [(one, change(one)) for one in pools]
        if not any(changed for _, changed in found):
            return None
        texts += [changed[0] for _, changed in found if changed is not None]
        pools = tuple(part for one, changed in found for part in (changed[1] if changed is not None else (one,)))
    return " and ".join(texts), pools


def _sharded(worker: _Worker) -> tuple[str, tuple[_Worker, ...]] | None:
    """All models divided over the workers of the pool."""
    whole = _whole(worker)
    if not whole or worker.pool.workers == 1:
        return None
    return f"{_named(whole, 'parallel: fsdp2')} over {worker.pool.workers} workers", (_divided(worker),)


def _whole(worker: _Worker) -> set[str]:
    """Models that each worker holds whole, and need not."""
    return {share.model for share in worker.shares() if share.what == "weights" and not share.sharded}


def _divided(worker: _Worker) -> _Worker:
    return _with_models(worker, _whole(worker), parallel="fsdp2")


def _narrow(worker: _Worker) -> tuple[str, tuple[_Worker, ...]] | None:
    """Frozen models in two bytes a weight."""
    used = {share.model: worker.specs[share.model] for share in worker.shares()}
    wide = {name for name, spec in used.items() if not spec.trainable and spec.dtype == "float32"}
    text = _named(wide, "dtype: bfloat16")
    return (text, (_with_models(worker, wide, dtype="bfloat16"),)) if wide else None


def _named(models: Iterable[str], change: str) -> str:
    return ", ".join(f"models.{name}.{change}" for name in sorted(models))


def _with_models(worker: _Worker, names: set[str], **changes: str) -> _Worker:
    specs = {name: spec.model_copy(update=changes) if name in names else spec for name, spec in worker.specs.items()}
    return replace(worker, specs=specs)


def _apart(worker: _Worker) -> tuple[str, tuple[_Worker, ...]] | None:
    """Rollouts on workers of their own, of the same size."""
    names = [node.name for node in worker.nodes if node.weights == "generates" and node.name not in worker.stay]
    moved = tuple(node for node in worker.nodes if node.name in names)
    others = tuple(node for node in worker.nodes if node.name not in names)
    if not moved or not others:
        return None
    return f"a pool of its own for {', '.join(names)}", (replace(worker, nodes=others), replace(worker, nodes=moved))


def _more_workers(pools: tuple[_Worker, ...]) -> str:
    """How many workers it takes if models are divided over them; empty where no number is enough."""
    divided = [_divided(one) for one in pools]
    now = max(one.pool.workers for one in pools)

    def fit(num: int) -> bool:
        return all(replace(one, pool=replace(one.pool, workers=num)).fits for one in divided)

    numbers = range(now, _MOST_WORKERS + 1)
    place = bisect_left(numbers, True, key=fit)
    if place in (0, len(numbers)):
        return ""
    whole = {name for one in pools for name in _whole(one)}
    return f"{_named(whole, 'parallel: fsdp2')} over " * bool(whole) + f"at least {numbers[place]:,} workers"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.1f}"
