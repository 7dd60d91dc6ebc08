"""The policy of a run: the one place where the mode of a schedule becomes behaviour."""

from __future__ import annotations

from flowrl.graph.plan import Plan
from flowrl.schedule.base import Schedule
from flowrl.schedule.colocate_async import ColocateAsync
from flowrl.schedule.separate_async import SeparateAsync
from flowrl.schedule.sync import Sync
from flowrl.spec.document import AsyncSchedule


def schedule_of(plan: Plan) -> Schedule:
    """What `schedule:` of the document asks for."""
    document, spec = plan.document, plan.document.schedule
    if not isinstance(spec, AsyncSchedule):
        return Sync(document.batch.prompts, gated=plan.gate is not None)
    policy = SeparateAsync if spec.mode == "separate_async" else ColocateAsync
    if plan.gate is not None and not spec.max_staleness and document.updates_per_sync == 1:
        return Sync(document.batch.prompts, gated=True, pauses=policy.pauses, serves=True)
    return policy(
        batch=plan.groups_per_batch,
        capacity=document.prompts_in_flight,
        slack=spec.max_staleness,
        patient=spec.stale == "wait",
        updates=document.updates_per_sync,
    )
