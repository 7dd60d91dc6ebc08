"""Checks of what runs where and on how much: pools (FR012, FR050, FR052, FR054), batches (FR060 to FR062, FR078)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import lcm

from flowrl.errors import Problem, nearest
from flowrl.graph.bind import CPU_POOL, BoundNode
from flowrl.graph.pools import physical_name
from flowrl.graph.sizes.lengths import MINIBATCH, SHUFFLE
from flowrl.graph.subject import Subject
from flowrl.graph.words import count
from flowrl.spec.document import PoolSpec

_REACH = 10_000
"""How far from a number its divisors are looked for."""


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


def copies_fill_their_pool(subject: Subject) -> Iterator[Problem]:
    """FR052: the copies of a model that is split over workers take all workers of their pool."""
    pools = subject.document.pools
    for node in subject.nodes:
        home, each = physical_name(pools, node.pool), node.workers_per_copy
        if node.weights != "generates" or home not in pools or pools[home].workers % each == 0:
            continue
        workers = pools[home].workers
        fits = -(-workers // each) * each
        yield Problem("FR052", subject.place("pools", home, "workers"),
                      f"nodes.{node.name} splits its model over {each} workers, but pool '{home}' has "
                      f"{workers}: {workers % each} would be left over",
                      f"workers: {fits}, for {count(fits // each, 'copy', 'copies')}")  # fmt: skip


def _updates(subject: Subject) -> Iterator[tuple[BoundNode, int, int]]:
    """Nodes that cut the batch in mini-batches, with the prompts of a batch and of a mini-batch."""
    for node in subject.nodes:
        minibatch = _minibatch(subject, node)
        if minibatch is not None:
            yield node, _batch(subject), minibatch


def _minibatch(subject: Subject, node: BoundNode) -> int | None:
    """Prompts of a node's mini-batch; None of a node that has none, or where the batch is not known."""
    found = getattr(node.node, MINIBATCH, None) if node.weights == "updates" else None
    unknown = any(subject.reading.is_broken(path) for path in (("batch", "prompts"), ("batch", "group"), ("schedule",)))
    return found if isinstance(found, int) and not isinstance(found, bool) and not unknown else None


def _batch(subject: Subject) -> int:
    """Prompts that an update trains at a time."""
    return max(1, subject.document.batch.prompts // subject.document.updates_per_sync)


def cut_evenly(subject: Subject, node: BoundNode) -> bool:
    """Whether nothing is wrong with a node's mini-batches: if there is, their number means nothing."""
    minibatch = _minibatch(subject, node)
    if minibatch is None:
        return True
    even = not subject.document.batch.prompts % subject.document.updates_per_sync
    return even and minibatch > 0 and not _batch(subject) % minibatch


def empty_minibatch(subject: Subject) -> Iterator[Problem]:
    """FR007: a mini-batch has prompts, also where the class of an update does not say so."""
    for node, _, minibatch in _updates(subject):
        if minibatch < 1:
            yield Problem("FR007", subject.place_of(node, MINIBATCH),
                          f"nodes.{node.name}: mini-batches have at least 1 prompt, not {minibatch}",
                          f"{MINIBATCH}: {_batch(subject)}")  # fmt: skip


def batches_divide(subject: Subject) -> Iterator[Problem]:
    """FR060: the batches between two syncs divide the prompts of a step."""
    prompts, updates = subject.document.batch.prompts, subject.document.updates_per_sync
    found = list(_updates(subject))
    if found and prompts % updates:
        parts = lcm(*(max(minibatch, 1) for _, _, minibatch in found))
        fits = next((num for num in _divisors(prompts, updates) if not prompts // num % parts), 0)
        more = -(-prompts // (updates * parts)) * updates * parts
        fix = f"updates_per_sync: {fits}, or " * bool(fits) + f"batch.prompts: {more}"
        yield Problem("FR060", subject.place("schedule", "updates_per_sync"),
                      f"{count(prompts, 'prompt')} of a step cannot be cut into {updates} batches, one for each update "
                      "between two syncs", fix)  # fmt: skip


def minibatch_divides(subject: Subject) -> Iterator[Problem]:
    """FR060: mini-batches divide the batch."""
    document = subject.document
    updates = document.updates_per_sync
    per = f" / {updates} updates per sync" if updates > 1 else ""
    for node, prompts, minibatch in _updates(subject):
        if minibatch > 0 and not document.batch.prompts % updates and prompts % minibatch:
            least = -(-_workers(subject, node) // document.batch.group)
            best = next((size for size in _divisors(prompts, minibatch) if size >= least), prompts)
            yield Problem("FR060", subject.place("nodes", node.name, MINIBATCH),
                          f"nodes.{node.name}: mini-batches of {minibatch} prompts do not divide the batch of "
                          f"{document.batch.prompts} prompts{per}", f"{MINIBATCH}: {best}")  # fmt: skip


def _divisors(number: int, wanted: int) -> Iterator[int]:
    """Divisors of a number within reach of another one, the nearest first."""
    wanted = min(wanted, number)
    near = (divisor for far in range(_REACH) for divisor in (wanted - far, wanted + far) if 0 < divisor <= number)
    return (divisor for divisor in near if number % divisor == 0)


def _workers(subject: Subject, node: BoundNode) -> int:
    """Of the pool that a node runs on; 1 where that is not known."""
    pools = subject.document.pools
    pool = pools.get(physical_name(pools, node.pool) or "")
    return pool.workers if pool is not None else 1


def rows_for_every_rank(subject: Subject) -> Iterator[Problem]:
    """FR061: every rank gets a row of each mini-batch."""
    pools, group = subject.document.pools, subject.document.batch.group
    for node, prompts, minibatch in _updates(subject):
        rows, workers = minibatch * group, _workers(subject, node)
        if cut_evenly(subject, node) and rows < workers:
            least = -(-workers // group)
            enough = next((size for size in _divisors(prompts, least) if size >= least), 0)
            fewer = f"pools.{physical_name(pools, node.pool)}.workers: {rows}"
            yield Problem("FR061", subject.place("nodes", node.name, MINIBATCH),
                          f"nodes.{node.name}: a mini-batch of {minibatch} prompts x {group} samples has {rows} rows "
                          f"for {workers} workers: some would have none",
                          f"{MINIBATCH}: {enough}, or {fewer}" if enough
                          else f"{fewer}, or a larger batch")  # fmt: skip


def nothing_to_shuffle(subject: Subject) -> Iterator[Problem]:
    """FR078: warning where prompts are dealt to mini-batches in another order, and there is one mini-batch."""
    for node, prompts, minibatch in _updates(subject):
        if getattr(node.node, SHUFFLE, None) is True and minibatch == prompts and cut_evenly(subject, node):
            smaller = f", or {MINIBATCH}: {next(_divisors(prompts, prompts // 2))}" * (prompts > 1)
            yield Problem("FR078", subject.place_of(node, SHUFFLE),
                          f"nodes.{node.name}: {SHUFFLE} has no effect: a batch of {count(prompts, 'prompt')} is one "
                          "mini-batch", f"{SHUFFLE}: false{smaller}", severity="warning")  # fmt: skip


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
