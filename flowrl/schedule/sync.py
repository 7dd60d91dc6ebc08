"""`sync`: P prompts are admitted when the step before has ended, and trained together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.schedule.flow import Flow


@dataclass(frozen=True)
class Sync:
    """Drain, train, sync, again: no trained token is stale."""

    prompts: int
    """P: groups of a batch."""
    gated: bool = False
    """Whether a gate says which groups to keep."""
    pauses: bool = False
    serves: bool = False
    patient: bool = False

    def num_to_admit(self, flow: Flow) -> int:
        """A whole batch when nothing is in flight; behind a gate, as many more as should fill it, but no more than P.

        How many that is follows from the share that the gate has kept of this step's groups.
        """
        if not self.gated or not flow.groups:
            return self.prompts - len(flow.groups)
        missing = self.prompts - len(flow.ready)
        if missing <= 0 or flow.running or flow.in_batches:
            return 0
        num_kept = max(len(flow.ready), 1)
        return min(self.prompts, math.ceil(missing * (num_kept + flow.refused) / num_kept))

    def cut(self, flow: Flow, version: int) -> Sequence[str] | None:
        """All that was admitted, at once: what works on single groups need not wait for the others.

        Behind a gate, the first P groups kept.
        """
        if not self.gated:
            return [group.uid for group in flow.waiting]
        if flow.running or len(flow.ready) < self.prompts:
            return None
        return [group.uid for group in flow.ready[: self.prompts]]

    def overdue(self, flow: Flow, version: int) -> list[str]:
        """None: all tokens are of the step's weights."""
        return []

    def surplus(self, flow: Flow) -> list[str]:
        """What was kept beyond a batch: the next step's weights are others."""
        return [group.uid for group in flow.waiting]
