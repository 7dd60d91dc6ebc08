"""Checks of the schedule: staleness, pools, keys without effect, capacity, sampling (FR070 to FR074, FR079)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.bind import CPU_POOL, raised
from flowrl.graph.pools import physical_name
from flowrl.graph.sizes.lengths import AFTER_STEP, setting
from flowrl.graph.subject import Subject
from flowrl.spec.document import AsyncSchedule, PoolSpec, SyncSchedule
from flowrl.spec.scalars import number


def stale_samples(subject: Subject) -> Iterator[Problem]:
    """FR070: a schedule that hands a node older samples than it can use."""
    schedule = subject.document.schedule
    if isinstance(schedule, SyncSchedule) or subject.reading.is_broken(("schedule", "max_staleness")):
        return
    lost = subject.bound.unresolved or subject.renamed_badly  # who may be the one that corrects
    for node in subject.nodes:
        corrections = node.cls.corrections
        if corrections.keys() & node.reads.keys() or (corrections and lost):
            continue
        try:
            allowed = node.node.max_staleness() if node.node is not None else math.inf
            limit = max(int(min(allowed, schedule.max_staleness)), 0)
        except Exception as error:  # the class may be a user's
            yield raised(node.name, node.cls, error, subject.reading)
            continue
        if limit < schedule.max_staleness:
            fixes = [f"max_staleness: {limit}"]
            fixes += [f"add {line}, which writes '{node.spec.reads.get(port, port)}'"
                      for port, line in corrections.items()]  # fmt: skip
            yield Problem("FR070", subject.place("schedule", "max_staleness"),
                          f"nodes.{node.name} ({node.use}) is right for samples up to {limit} version"
                          f"{'s' * (limit != 1)} old, but this schedule hands it samples up to "
                          f"{schedule.max_staleness} old", ", or ".join(fixes))  # fmt: skip


def pools_of_the_schedule(subject: Subject) -> Iterator[Problem]:
    """FR071: separate_async needs pools of their own for rollout and training, colocate_async a shared one."""
    together, pools = subject.document.schedule.together, subject.document.pools
    if together is None or subject.reading.is_broken(("pools",)):
        return
    for update in (node for node in subject.nodes if node.weights == "updates"):
        home = physical_name(pools, update.pool)
        for rollout in subject.of_role(update.model, "generates"):
            there = physical_name(pools, rollout.pool)
            built_in = CPU_POOL in (home, there) and CPU_POOL not in pools  # where no model can be, as is told
            if (
                None in (home, there)
                or built_in
                or any(subject.reading.is_broken(("nodes", n.name, "pool")) for n in (update, rollout))
            ):
                continue
            place = subject.place("nodes", rollout.name, "pool")
            if not together and home == there:
                yield Problem("FR071", place,
                              f"nodes.{rollout.name} generates on the workers of pool '{home}', on which "
                              f"nodes.{update.name} trains: separate_async lets both run at once, on workers of their "
                              "own", f"pools.{rollout.pool}: {{shares: null, workers: 1}}" if rollout.pool != home
                              else "pool: another one")  # fmt: skip
            if together and home != there:
                yield Problem("FR071", place,
                              f"nodes.{rollout.name} generates on pool '{there}' and nodes.{update.name} trains on "
                              f"pool '{home}': colocate_async lets them take turns on the same workers",
                              f"pools.{rollout.pool}: {{shares: {update.pool}{_nulls(pools[rollout.pool])}}}, or mode: "
                              "separate_async")  # fmt: skip


def _nulls(pool: PoolSpec) -> str:
    """The settings that a pool loses when it shares another one's workers."""
    return "".join(f", {key}: null" for key in sorted(pool.model_fields_set - {"shares"}))


def keys_without_effect(subject: Subject) -> Iterator[Problem]:
    """FR072: warning for settings of the schedule that its other settings make meaningless."""
    schedule = subject.document.schedule
    if not isinstance(schedule, AsyncSchedule) or subject.reading.is_broken(("schedule",)):
        return
    given = schedule.model_fields_set

    def unused(key: str, why: str, fix: str) -> Problem:
        return Problem("FR072", subject.place("schedule", key), f"schedule.{key} has no effect: {why}", fix,
                       severity="warning")  # fmt: skip

    if "stale" in given and schedule.max_staleness == 0:
        yield unused("stale", "with max_staleness: 0 no sample is ever too old", "remove `stale:`")
    if "warmup_batches" in given and schedule.max_in_flight is not None:
        yield unused("warmup_batches", "max_in_flight says how many prompts are in flight", "remove one of the two")
    elif "warmup_batches" in given and schedule.warmup_batches > schedule.max_staleness:
        yield unused("warmup_batches", f"at most max_staleness ({schedule.max_staleness}) batches are started ahead, "
                     f"not {schedule.warmup_batches}", f"warmup_batches: {schedule.max_staleness}")  # fmt: skip
    if "max_restarts" in given and not _gives_up(subject) and (schedule.stale == "wait" or not schedule.max_staleness):
        yield unused("max_restarts", "no prompt is given up: none is ever too old, and no rollout has a timeout",
                     "remove `max_restarts:`, or give the rollout a `timeout:`")  # fmt: skip


def _gives_up(subject: Subject) -> bool:
    """Whether a rollout may have no end within its time, as far as can be told."""
    broken = any(subject.reading.is_broken(("nodes", node.name, "timeout")) for node in subject.nodes)
    limited = (node for node in subject.nodes if node.weights == "generates" and node.spec.timeout is not None)
    return broken or bool(subject.bound.unresolved) or any(node.on_error in ("drop", "retry") for node in limited)


def capacity(subject: Subject) -> Iterator[Problem]:
    """FR073: prompts in flight that can never fill a batch, or of which some are always too old to train on."""
    schedule, prompts = subject.document.schedule, subject.document.batch.prompts
    broken = any(subject.reading.is_broken(path) for path in (("schedule",), ("batch", "prompts")))
    if not isinstance(schedule, AsyncSchedule) or schedule.max_in_flight is None or broken:
        return
    in_flight = schedule.max_in_flight
    oldest = -(-in_flight // prompts) - 1
    place = subject.place("schedule", "max_in_flight")
    if in_flight < prompts:
        note = (f"after {in_flight} groups have settled, no prompt is admitted before they are trained and synced, and "
                f"that waits for {prompts - in_flight} more")  # fmt: skip
        yield Problem("FR073", place, f"{in_flight} prompts in flight can never fill a step of {prompts}",
                      f"max_in_flight: {prompts} or more", (note,))  # fmt: skip
    elif oldest > schedule.max_staleness:
        wasted = "always dropped" if schedule.stale == "drop" else "waited for without end"
        note = (f"with {in_flight} in flight and {prompts} trained a step, the last of them is trained {oldest} "
                f"versions after it was started")  # fmt: skip
        yield Problem("FR073", place,
                      f"{in_flight} prompts in flight are more than max_staleness {schedule.max_staleness} allows: the "
                      f"last {in_flight - prompts * (1 + schedule.max_staleness)} of them would be {wasted}",
                      f"max_in_flight: {prompts * (1 + schedule.max_staleness)} or less, or max_staleness: {oldest}",
                      (note,))  # fmt: skip


NEUTRAL = {
    "top_p": (1,),
    "top_k": (0, -1, None),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
}
"""Settings that change the distribution that tokens are drawn from, with the values that leave it alone."""


def other_distribution(subject: Subject) -> Iterator[Problem]:
    """FR074: warning where training rollouts draw from another distribution than the policy's."""
    for node in subject.nodes:
        if node.weights != "generates" or not subject.of_role(node.model, "updates"):
            continue
        for key, neutral in NEUTRAL.items():
            value = getattr(node.node, key, neutral[0])
            if isinstance(value, (int, float)) and value not in neutral:  # null leaves it to the engine
                yield Problem("FR074", subject.place("nodes", node.name, key),
                              f"nodes.{node.name}: {key} {number(value)} draws training samples from another "
                              "distribution than the one whose log-probabilities are trained on",
                              f"{key}: {'null' if neutral[0] is None else neutral[0]} here; keep it for validation",
                              severity="warning")  # fmt: skip


def not_available(subject: Subject) -> Iterator[Problem]:
    """FR079: warning for what can be written and checked, but not run by this version; `flowrl run` refuses it."""

    def refused(fact: str, fix: str, *path: str) -> Problem:
        return Problem("FR079", subject.place(*path), f"{fact} cannot be run by this version yet", fix,
                       severity="warning")  # fmt: skip

    document = subject.document
    trained = _trained_on(subject)
    for node in subject.nodes:
        if node.spec.every > 1 and node.name in trained:
            yield refused(f"nodes.{node.name}: 'every:' of a node that training needs", "remove `every:`", "nodes",
                          node.name, "every")  # fmt: skip
    for name, pool in document.pools.items():
        if pool.nodes is not None:
            yield refused(f"pools.{name}: 'nodes:'", "remove `nodes:`; Ray chooses the machines",
                          "pools", name, "nodes")  # fmt: skip
    for name, model in document.models.items():
        whole = [node for node in subject.nodes if name in node.models and node.weights in ("reads", "updates")]
        whole = [node for node in whole if not node.cls.takes_shards]
        if model.parallel == "fsdp2" and whole:
            yield refused(f"nodes.{whole[0].name} ({whole[0].use}) on shares of models.{name}", "parallel: ddp",
                          "models", name, "parallel")  # fmt: skip


def _trained_on(subject: Subject) -> frozenset[str]:
    """What every step of training needs: what generates, updates and syncs, and what these depend on."""
    graph = subject.graph
    roles = ("updates", "syncs", "generates")
    return graph.leading_to(name for name in graph.training.nodes if graph.nodes[name].weights in roles)


def ignored(subject: Subject) -> Iterator[Problem]:
    """FR078: warning for a setting that changes nothing in this version."""
    for node in subject.nodes:
        if node.spec.every > 1 and node.name in subject.graph.only_validated and not node.evaluates:
            yield Problem("FR078", subject.place("nodes", node.name, "every"),
                          f"nodes.{node.name}: 'every:' has no effect: it runs whenever a validation needs it",
                          "remove `every:`", severity="warning")  # fmt: skip
        waits, steps = setting(node, AFTER_STEP), subject.document.run.steps
        if waits is not None and waits >= steps and node.weights == "updates":
            yield Problem("FR078", subject.place("nodes", node.name, AFTER_STEP),
                          f"nodes.{node.name} updates nothing: it begins after step {waits}, and the run has {steps}",
                          f"{AFTER_STEP}: 0", severity="warning")  # fmt: skip
