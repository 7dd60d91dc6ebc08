"""Pools: which logical pools share workers, and what each group of workers asks of the machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flowrl.graph.bind import CPU_POOL, BoundNode
from flowrl.spec.document import PoolSpec


@dataclass(frozen=True)
class Pool:
    """One group of workers, with the logical pools that share it."""

    name: str
    workers: int
    cpus_per_worker: float
    holds_model: bool
    """Whether its workers compute with models: then a CUDA machine gives each an accelerator."""
    logical: tuple[str, ...]
    resources: Mapping[str, float]
    threads_per_worker: int | None = None
    """What it computes with; None is a share of the machine's cores."""

    def needs(self, accelerators: bool) -> dict[str, float]:
        """What one worker asks for, by Ray's names; an accelerator only where the machines have any."""
        gpu = {"GPU": 1.0} if self.holds_model and accelerators else {}
        return {"CPU": self.cpus_per_worker, **self.resources, **gpu}


def physical_name(pools: Mapping[str, PoolSpec], name: str) -> str | None:
    """The pool whose workers a logical pool runs on; None where `shares:` leads nowhere or in a circle."""
    seen: list[str] = []
    while name not in seen:
        seen.append(name)
        if name == CPU_POOL and name not in pools:
            return name
        if name not in pools:
            return None
        shared = pools[name].shares
        if shared is None:
            return name
        name = shared
    return None


def physical_pools(pools: Mapping[str, PoolSpec], nodes: Iterable[BoundNode]) -> dict[str, Pool]:
    """The groups of workers that the nodes need, by name."""
    used: dict[str, list[BoundNode]] = {}
    for node in nodes:
        if node.weights != "syncs":
            name = physical_name(pools, node.pool)
            assert name is not None, "checked before"
            used.setdefault(name, []).append(node)
    found: dict[str, Pool] = {}
    for name in sorted(used):
        spec = pools.get(name) or PoolSpec(workers=_most_at_once(used[name]))
        holds_model = any(node.weights is not None or node.cls.device == "accelerator" for node in used[name])
        cpus = spec.cpus_per_worker if spec.cpus_per_worker is not None else float(holds_model)
        logical = tuple(sorted({node.pool for node in used[name]}))
        found[name] = Pool(name, spec.workers, cpus, holds_model, logical, spec.resources, spec.threads_per_worker)
    return found


def _most_at_once(nodes: Sequence[BoundNode]) -> int:
    """Workers that the built-in pool needs so that its nodes need not wait for each other: two rewards, two workers.

    Nodes that read what another one of them writes never run at the same time.
    """
    written = {field for node in nodes for field in node.writes.values()}
    first = [node for node in nodes if written.isdisjoint(node.fields_read)]
    return max(1, min(len(first), 4))
