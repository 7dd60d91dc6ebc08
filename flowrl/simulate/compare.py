"""The three schedules side by side, on as many workers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flowrl.graph.plan import Plan
from flowrl.simulate.costs import Costs
from flowrl.simulate.run import Outcome, simulate
from flowrl.simulate.variants import Team, schedules, team_of, under
from flowrl.spec.document import ScheduleSpec

STEPS, FEWEST_STEPS, GROUPS = 50, 10, 5120
"""Simulated, where nobody says how many: so many steps, fewer where these would be more groups than that."""
SPLIT_SHARE = 0.4
"""Of the steps, what is simulated for a split that is only tried."""


@dataclass(frozen=True)
class Comparison:
    """What was simulated."""

    name: str
    """Of the pipeline."""
    costs: Costs
    own: Outcome
    """Of the schedule that the pipeline has, which is one of the three."""
    outcomes: tuple[Outcome, ...]
    """Of the three schedules."""
    splits: tuple[Outcome, ...]
    """Of `separate_async`, for every way to split the workers that was tried."""


def compare(
    plan: Plan,
    costs_of: Callable[[Plan], Costs],
    steps: int | None = None,
    tell: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Simulate a pipeline under every schedule, and `separate_async` with every split.

    Of the splits that of the pipeline stands for its schedule, else the fastest one. `tell` is told what is simulated
    next. Raises `NotComparable`, and `RunError` where a run would fail.
    """
    base, team = team_of(plan)
    steps = steps or min(STEPS, max(FEWEST_STEPS, GROUPS // plan.document.batch.prompts))

    def run(schedule: ScheduleSpec, members: Team, num_steps: int) -> Outcome:
        who = members.workers if members.shared else f"{members.training} + {members.rollout}"
        tell(f"{schedule.mode}, {num_steps} steps, workers: {who}")
        variant = under(base, members, schedule, num_steps)
        return simulate(variant, members, costs_of(variant))

    *together, apart = schedules(base)
    outcomes = [run(schedule, team.joined(), steps) for schedule in together]
    own = type(plan.document.schedule)
    has_split = isinstance(apart, own) and not team.shared
    teams = team.splits()
    teams += [team] if has_split and team not in teams else []
    tried = {members: run(apart, members, math.ceil(steps * SPLIT_SHARE)) for members in teams}
    chosen = team if has_split else min(tried, key=lambda members: tried[members].step_seconds)
    outcomes.append(run(apart, chosen, steps))
    tried[chosen] = outcomes[-1]
    mine = next(each for each in outcomes if isinstance(each.plan.document.schedule, own))
    return Comparison(plan.document.name, costs_of(mine.plan), mine, tuple(outcomes), tuple(tried.values()))
