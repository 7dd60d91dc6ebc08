"""`colocate_async`: rollouts and training take turns on the same workers; unfinished requests go on afterwards."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.schedule.ahead import Ahead


@dataclass(frozen=True)
class ColocateAsync(Ahead):
    """As soon as a batch is ready the engines sleep, with their requests kept, until it is trained and synced."""

    pauses: bool = True
