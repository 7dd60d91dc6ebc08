"""`sync`: P prompts are admitted when the step before has ended; the batch is ready when all of them have settled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sync:
    """Drain, train, sync, again: no trained token is stale."""

    prompts: int

    def num_to_admit(self, num_in_flight: int) -> int:
        """A whole batch when nothing is in flight, else nothing."""
        return 0 if num_in_flight else self.prompts
