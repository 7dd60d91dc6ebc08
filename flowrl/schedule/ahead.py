"""What the asynchronous schedules have in common: rollouts run ahead of training, and their age is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowrl.schedule.flow import Flow, Group


@dataclass(frozen=True)
class Ahead:
    """Prompts are in flight beyond a batch; a batch is cut of those that are ready, the oldest first.

    A prompt leaves the flow when it has been trained. So with C prompts in flight and P trained a version, the last of
    them is trained ceil(C / P) - 1 versions after its admission, which is at most `slack` (FR073).
    """

    batch: int
    """Groups of a batch: P / updates_per_sync."""
    capacity: int
    """C: most prompts in flight."""
    slack: int
    """Versions that a trained token may be behind."""
    patient: bool = False
    """Wait for what would be too old next time (`stale: wait`) instead of giving it up."""
    updates: int = 1
    """Batches that are trained a version."""
    serves: bool = True

    def num_to_admit(self, flow: Flow) -> int:
        """As many as there is room for."""
        return max(0, self.capacity - len(flow.groups))

    def cut(self, flow: Flow, version: int) -> Sequence[str] | None:
        """The oldest groups that are ready, in the order of admission; without slack the first ones, ready or not yet.

        Where a batch of what is ready would leave more groups that are never given up than the later batches can take
        before these are too old, it waits for them.
        """
        if self.slack == 0:
            first = flow.waiting[: self.batch]
            return self._batch(first) if all(group.settled for group in first) else None
        first = sorted(flow.ready, key=lambda group: (not group.waits, group.waits * -group.age(version), group.number))
        late = [group for group in flow.running if group.waits]
        rest = [group for group in first[self.batch :] if group.waits]
        if late and not self._in_time([*late, *rest], flow, version):
            return None
        return self._batch(sorted(first[: self.batch], key=lambda group: group.number))

    def _in_time(self, groups: Sequence[Group], flow: Flow, version: int) -> bool:
        """Whether the batches after the next one can take all these, the oldest first, before they are too old."""
        num_cut = -(-len(flow.in_batches) // self.batch) + 1
        ages = sorted((group.age(version) for group in groups), reverse=True)
        batches = [self.updates * (1 + self.slack - age) - num_cut for age in ages]
        return all(number <= num * self.batch for number, num in enumerate(batches, 1))

    def _batch(self, groups: Sequence[Group]) -> Sequence[str] | None:
        return [group.uid for group in groups] if len(groups) == self.batch else None

    def overdue(self, flow: Flow, version: int) -> list[str]:
        """Groups of no batch yet that are too old for any."""
        return [group.uid for group in flow.waiting if not group.waits and group.age(version) > self.slack]

    def surplus(self, flow: Flow) -> list[str]:
        """None: what a batch does not take is for the next one."""
        return []
