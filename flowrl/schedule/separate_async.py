"""`separate_async`: rollouts never stop; training takes batches as they become ready, on workers of its own."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.schedule.ahead import Ahead


@dataclass(frozen=True)
class SeparateAsync(Ahead):
    """Engines go on while a batch trains, and take new weights between two tokens."""

    pauses: bool = False
