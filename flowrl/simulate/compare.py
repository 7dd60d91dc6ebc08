"""The three schedules side by side, on as many workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowrl.graph.plan import Plan
from flowrl.simulate.costs import Costs
from flowrl.simulate.run import Outcome, simulate
from flowrl.simulate.variants import schedules, team_of, under
from flowrl.spec.document import SeparateAsyncSchedule

STEPS = 50
"""Simulated, where nobody says how many."""


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


def compare(plan: Plan, costs_of: Callable[[Plan], Costs], steps: int = STEPS) -> Comparison:
    """Simulate a pipeline under every schedule, and `separate_async` with every split.

    Of the splits that of the pipeline stands for its schedule, else the fastest one. Raises `NotComparable`, and
    `RunError` where a run would fail.
    """
    base, team = team_of(plan)
    outcomes, splits = list[Outcome](), list[Outcome]()
    for schedule in schedules(base):
        apart = isinstance(schedule, SeparateAsyncSchedule)
        teams = [team.joined()]
        if apart:
            teams = team.splits()
            teams += [team] if not team.shared and team not in teams else []
        plans = [(under(base, each, schedule, steps), each) for each in teams]
        found = [simulate(each, members, costs_of(each)) for each, members in plans]
        best = min(found, key=lambda outcome: outcome.step_seconds)
        is_own = plan.document.schedule.mode == schedule.mode
        outcomes.append(next((each for each in found if is_own and each.team == team), best))
        splits += found if apart else []
    own = next(each for each in outcomes if each.plan.document.schedule.mode == plan.document.schedule.mode)
    return Comparison(plan.document.name, costs_of(own.plan), own, tuple(outcomes), tuple(splits))
