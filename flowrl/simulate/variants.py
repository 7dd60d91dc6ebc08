"""The same pipeline under every schedule, on as many workers: shared, or split between rollout and training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.pools import physical_pools
from flowrl.spec.document import (
    AsyncSchedule,
    ColocateAsyncSchedule,
    PoolSpec,
    ScheduleSpec,
    SeparateAsyncSchedule,
    SyncSchedule,
)

MOST_SPLITS = 9
"""Of the workers between rollout and training, of which one is tried."""
ENGINES = "generate"
"""What a pool for rollouts is called, where they have none of their own."""


class NotComparable(Exception):
    """A pipeline for which the question which schedule pays has no meaning."""


@dataclass(frozen=True)
class Team:
    """The workers that train, and those that generate with what they train; the same ones where `shared`."""

    trainers: str
    engines: str
    """Their pools; what of the document's names stands for these."""
    training: int
    rollout: int
    shared: bool
    multiple: int = 1
    """What the number of workers that generate is a multiple of: those that hold one copy of the model."""

    @property
    def workers(self) -> int:
        """All of them."""
        return self.training if self.shared else self.training + self.rollout

    def split(self, rollout: int) -> Team:
        """So many of them generate, the others train; at least one."""
        return replace(self, rollout=rollout, training=max(1, self.workers - rollout), shared=False)

    def joined(self) -> Team:
        """All of them do both."""
        return replace(self, training=self.workers, rollout=self.workers, shared=True)

    def splits(self) -> list[Team]:
        """The ways to split them, at most `MOST_SPLITS`, evenly spread."""
        most = max(1, (self.workers - 1) // self.multiple)
        num = min(most, MOST_SPLITS)
        every = {round(1 + place * (most - 1) / max(1, num - 1)) for place in range(num)}
        return [self.split(copies * self.multiple) for copies in sorted(every)]


def team_of(plan: Plan) -> tuple[Plan, Team]:
    """The workers of a plan that schedules are about; in the plan, their pools have names of their own.

    Raises `NotComparable` where nothing is trained with what it has generated itself, or in several places.
    """
    graph = plan.graph.training
    updates = {node.model: node for node in graph.nodes.values() if node.weights == "updates"}
    rollouts = [node for node in graph.nodes.values() if node.weights == "generates" and node.model in updates]
    if not rollouts:
        raise NotComparable("no model is trained on what it generates, so all schedules are the same")
    pools = {plan.pool_of(node) for node in rollouts}
    trainers = {plan.pool_of(updates[node.model]) for node in rollouts}
    if len(pools) > 1 or len(trainers) > 1:
        raise NotComparable(
            f"pools {', '.join(sorted(pools | trainers))}: one that trains and one that generates are compared"
        )
    (engines,), (trainer,) = pools, trainers
    team = Team(
        trainer, _own_pool(graph.nodes, rollouts, plan), plan.pools[trainer].workers, plan.pools[engines].workers,
        engines == trainer, max(node.workers_per_copy for node in rollouts),
    )  # fmt: skip
    moved = {node.name: replace(node, spec=node.spec.model_copy(update={"pool": team.engines})) for node in rollouts}
    return replace(plan, graph=replace(graph, nodes={**graph.nodes, **moved}), whole=None), team


def _own_pool(nodes: Mapping[str, BoundNode], rollouts: list[BoundNode], plan: Plan) -> str:
    """The name of a pool on which nothing trains: that of the rollouts, or a new one."""
    (name, *others) = {node.pool for node in rollouts}
    trained = {node.pool for node in nodes.values() if node.weights in ("reads", "updates")}
    if not others and name not in trained:
        return name
    return next(new for new in (ENGINES, *(f"{ENGINES}{n}" for n in range(2, 99))) if new not in plan.document.pools)


def under(plan: Plan, team: Team, schedule: ScheduleSpec, steps: int) -> Plan:
    """The plan with another schedule and other pools; without validation, samples, or a checkpoint."""
    old = plan.document
    trainers = old.pools.get(team.trainers, PoolSpec()).model_copy(update={"workers": team.training, "shares": None})
    engines = PoolSpec(shares=team.trainers) if team.shared else PoolSpec(workers=team.rollout)
    pools = {**old.pools, team.trainers: trainers, team.engines: engines}
    run = old.run.model_copy(
        update={"steps": steps, "samples": old.run.samples.model_copy(update={"rows": 0}), "max_failed": 1.0}
    )
    document = old.model_copy(update={"schedule": schedule, "pools": pools, "run": run, "checkpoint": None})
    return Plan(document, plan.graph, physical_pools(pools, plan.graph.nodes.values()))


def schedules(plan: Plan) -> Iterator[ScheduleSpec]:
    """The three of them; what the document says of asynchronous ones holds for both, and else what is usual.

    Samples are never older than every node can use, as a run would be refused for (FR070).
    """
    own = plan.document.schedule
    if isinstance(own, AsyncSchedule):
        shared = own.model_dump(include=set(AsyncSchedule.model_fields))
    else:
        shared = {"max_staleness": min([AsyncSchedule().max_staleness, *_usable(plan)])}
    yield SyncSchedule()
    yield ColocateAsyncSchedule(**shared)
    yield own if isinstance(own, SeparateAsyncSchedule) else SeparateAsyncSchedule(**shared)


def _usable(plan: Plan) -> Iterator[int]:
    """How old a sample may be for each node that bounds it."""
    for node in plan.graph.nodes.values():
        assert node.node is not None, "the plan was checked"
        try:
            allowed = node.node.max_staleness()
        except Exception as error:  # the class may be a user's
            raise NotComparable(f"nodes.{node.name}: max_staleness() of {node.use} raised {error!r}") from error
        if allowed < inf and not node.cls.corrections.keys() & node.reads.keys():
            yield max(0, int(allowed))
