"""Checks of what runs where and on how much: pools (FR012, FR050, FR052, FR054) and batches (FR060 to FR062)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flowrl.errors import Problem, nearest
from flowrl.graph.bind import CPU_POOL, BoundNode
from flowrl.graph.pools import physical_name
from flowrl.graph.subject import Subject
from flowrl.spec.document import Document, PoolSpec


def pool_shares(subject: Subject) -> Iterator[Problem]:
    """FR012: `shares:` names another pool, and does not run in a circle."""
    pools, known = subject.document.pools, subject.names("pools")
    told: set[str] = set()
    for name, pool in pools.items():
        if pool.shares is not None and pool.shares not in known:
            yield Problem("FR012", subject.place("pools", name, "shares"),
                          f"pools.{name} shares the workers of '{pool.shares}', which is not under pools:",
                          nearest(pool.shares, known - {name}) or "shares: null")  # fmt: skip
        circle = _circle(pools, name)
        if circle and told.isdisjoint(circle):
            told.update(circle)
            shown = " shares ".join([*circle, name])
            yield Problem("FR012", subject.place("pools", name, "shares"),
                          f"pools.{name} shares workers in a circle: {shown}",
                          "let one of them have `workers:`")  # fmt: skip


def _circle(pools: Mapping[str, PoolSpec], name: str) -> list[str]:
    """The pools on the way from this one back to itself; empty where it does not lead there."""
    path: list[str] = []
    following: str | None = name
    while following is not None and following in pools and following not in path:
        path.append(following)
        following = pools[following].shares
    return path if following == name else []


def model_nodes_need_a_pool(subject: Subject) -> Iterator[Problem]:
    """FR050: a node that holds a model cannot run on the built-in CPU pool."""
    for node in subject.nodes:
        needs_pool = node.cls.device == "accelerator" or node.weights in ("reads", "updates", "generates")
        refused = subject.reading.is_broken(("nodes", node.name, "pool"))
        built_in = node.pool == CPU_POOL and CPU_POOL not in subject.document.pools
        if needs_pool and node.weights != "syncs" and built_in and not refused:
            pools = [name for name in subject.document.pools if name != CPU_POOL]
            yield Problem("FR050", subject.place("nodes", node.name, key=True),
                          f"nodes.{node.name} ({node.use}) holds a model and needs a pool of its own, but runs on "
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


def workers_per_machine(subject: Subject) -> Iterator[Problem]:
    """FR052: workers are spread evenly over the machines of a pool."""
    for name, pool in subject.document.pools.items():
        if pool.nodes is not None and pool.workers % pool.nodes:
            fits = -(-pool.workers // pool.nodes) * pool.nodes
            yield Problem("FR052", subject.place("pools", name, "nodes"),
                          f"pools.{name}: {pool.workers} workers cannot be spread evenly over {pool.nodes} machines",
                          f"workers: {fits} ({fits // pool.nodes} on each)")  # fmt: skip


def _updates(subject: Subject) -> Iterator[tuple[BoundNode, int, int]]:
    """Nodes that cut the batch in mini-batches, with the prompts of a batch and of a mini-batch."""
    document = subject.document
    if any(subject.reading.is_broken(("batch", key)) for key in ("prompts", "group")):
        return
    for node in subject.nodes:
        minibatch = getattr(node.node, "minibatch", None)
        if node.weights == "updates" and isinstance(minibatch, int):
            yield node, max(1, document.batch.prompts // updates_per_sync(document)), minibatch


def updates_per_sync(document: Document) -> int:
    """Batches that one step trains."""
    return getattr(document.schedule, "updates_per_sync", 1)


def minibatch_divides(subject: Subject) -> Iterator[Problem]:
    """FR060: mini-batches divide the batch, and batches the prompts of a step."""
    document = subject.document
    updates = updates_per_sync(document)
    per = f" / {updates} updates per sync" if updates > 1 else ""
    for node, prompts, minibatch in _updates(subject):
        if document.batch.prompts % updates or prompts % minibatch:
            best = _nearest_divisor(prompts, minibatch)
            yield Problem("FR060", subject.place("nodes", node.name, "minibatch"),
                          f"nodes.{node.name}: mini-batches of {minibatch} prompts do not divide the batch of "
                          f"{document.batch.prompts} prompts{per}", f"minibatch: {best}")  # fmt: skip


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor that is nearest; 1 where there is none within reach."""
    wanted = min(wanted, number)
    near = (divisor for far in range(min(wanted, 10_000)) for divisor in (wanted - far, wanted + far))
    return next((divisor for divisor in near if number % divisor == 0), 1)


def rows_for_every_rank(subject: Subject) -> Iterator[Problem]:
    """FR061: every rank gets a row of each mini-batch."""
    document = subject.document
    for node, prompts, minibatch in _updates(subject):
        pool = document.pools.get(physical_name(document.pools, node.pool) or "")
        group = document.batch.group
        rows = minibatch * group
        divides = not document.batch.prompts % updates_per_sync(document) and not prompts % minibatch
        if divides and pool is not None and rows < pool.workers:
            yield Problem("FR061", subject.place("nodes", node.name, "minibatch"),
                          f"nodes.{node.name}: a mini-batch of {minibatch} prompts x {group} samples has {rows} rows "
                          f"for {pool.workers} workers: some would have none",
                          f"minibatch: at least {-(-pool.workers // group)}")  # fmt: skip


def group_of_one(subject: Subject) -> Iterator[Problem]:
    """FR062: warning where samples are compared with the others of their group, and there are none."""
    if subject.document.batch.group > 1 or subject.reading.is_broken(("batch", "group")):
        return
    for node in subject.nodes:
        if node.cls.compares_samples:
            yield Problem("FR062", subject.place("batch", "group"),
                          f"nodes.{node.name} ({node.use}) compares each sample with the others of its group, but "
                          "a group has one sample: there is nothing to learn from", "batch.group: 8",
                          severity="warning")  # fmt: skip
