"""Checks of what runs where and on how much: pools (FR012, FR050 to FR054) and batch arithmetic (FR060 to FR062)."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem, nearest
from flowrl.graph.bind import CPU_POOL
from flowrl.graph.pools import physical_name
from flowrl.graph.subject import Subject


def pool_shares(subject: Subject) -> Iterator[Problem]:
    """FR012: `shares:` names another pool, and does not run in a circle."""
    pools = subject.document.pools
    for name, pool in pools.items():
        if pool.shares is None:
            continue
        place = subject.place("pools", name, "shares")
        if pool.shares not in pools:
            yield Problem("FR012", place,
                          f"pools.{name} shares the workers of '{pool.shares}', which is not under pools:",
                          nearest(pool.shares, set(pools) - {name}))  # fmt: skip
        elif physical_name(pools, name) is None:
            yield Problem("FR012", place, f"pools.{name} shares workers in a circle", "let one of them have `workers:`")


def model_nodes_need_a_pool(subject: Subject) -> Iterator[Problem]:
    """FR050: a node that holds a model cannot run on the built-in CPU pool."""
    for node in subject.nodes:
        needs_pool = node.cls.device == "accelerator" or node.weights in ("reads", "updates", "generates")
        refused = subject.reading.is_broken(("nodes", node.name, "pool"))
        built_in = node.pool == CPU_POOL and CPU_POOL not in subject.document.pools
        if needs_pool and node.weights != "syncs" and built_in and not refused:
            pools = [name for name in subject.document.pools if name != CPU_POOL]
            yield Problem("FR050", subject.place("nodes", node.name, key=True),
                          f"nodes.{node.name} ({node.spec.use}) holds a model and needs a pool of its own, but runs on "
                          f"the built-in pool '{CPU_POOL}'", f"pool: {pools[0] if pools else 'NAME'}")  # fmt: skip


def readers_with_their_update(subject: Subject) -> Iterator[Problem]:
    """FR054: training weights live on the pool of the update; nodes that read them run there too."""
    pools = subject.document.pools
    for update in (node for node in subject.nodes if node.weights == "updates"):
        home = physical_name(pools, update.pool)
        for reader in subject.of_role(update.model, "reads"):
            there = physical_name(pools, reader.pool)
            if None not in (home, there) and there != home and CPU_POOL not in (home, there):
                yield Problem("FR054", subject.place("nodes", reader.name, "pool"),
                              f"nodes.{reader.name} reads the weights of '{update.model}' on pool '{reader.pool}', but "
                              f"nodes.{update.name} trains them on pool '{update.pool}'",
                              f"pool: {update.pool}")  # fmt: skip


def batch_arithmetic(subject: Subject) -> Iterator[Problem]:
    """FR060 and FR061: mini-batches divide the batch, and every rank gets a row of each."""
    document = subject.document
    if any(subject.reading.is_broken(("batch", key)) for key in ("prompts", "group")):
        return
    updates_per_sync = getattr(document.schedule, "updates_per_sync", 1)
    prompts = max(1, document.batch.prompts // updates_per_sync)
    for node in subject.nodes:
        minibatch = getattr(node.node, "minibatch", None)
        if node.weights != "updates" or not isinstance(minibatch, int):
            continue
        place = subject.place("nodes", node.name, "minibatch")
        per = f" / {updates_per_sync} updates per sync" if updates_per_sync > 1 else ""
        if document.batch.prompts % updates_per_sync or prompts % minibatch:
            fits = [d for d in range(1, prompts + 1) if prompts % d == 0]
            best = min(fits, key=lambda d: abs(d - minibatch))
            yield Problem("FR060", place, f"nodes.{node.name}: mini-batches of {minibatch} prompts do not divide the "
                          f"batch of {document.batch.prompts} prompts{per}", f"minibatch: {best}")  # fmt: skip
            continue
        pool = document.pools.get(physical_name(document.pools, node.pool) or "")
        rows = minibatch * document.batch.group
        if pool is not None and rows < pool.workers:
            yield Problem("FR061", place, f"nodes.{node.name}: a mini-batch of {minibatch} prompts x "
                          f"{document.batch.group} samples has {rows} rows for {pool.workers} workers: some would have "
                          "none", f"minibatch: at least {-(-pool.workers // document.batch.group)}")  # fmt: skip


def group_of_one(subject: Subject) -> Iterator[Problem]:
    """FR062: warning where samples are compared with the others of their group, and there are none."""
    if subject.document.batch.group > 1 or subject.reading.is_broken(("batch", "group")):
        return
    for node in subject.nodes:
        if node.cls.compares_samples:
            yield Problem("FR062", subject.place("batch", "group"),
                          f"nodes.{node.name} ({node.spec.use}) compares each sample with the others of its group, but "
                          "a group has one sample: there is nothing to learn from", "batch.group: 8",
                          severity="warning")  # fmt: skip
