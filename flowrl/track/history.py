"""The metrics of a run in memory, for the caller of `Pipeline.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.schedule.record import Event, Level, Status


class History:
    """Keeps the metrics of every step."""

    def __init__(self, before: Sequence[Mapping[str, float]] = ()) -> None:
        """`before` are those of the steps that earlier attempts at the run have made."""
        self.metrics: list[Mapping[str, float]] = list(before)

    def event(self, event: Event) -> None:
        """Not kept."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics."""
        self.metrics.append(dict(metrics))

    def note(self, text: str, level: Level = "info") -> None:
        """Not kept."""

    def stage(self, text: str) -> None:
        """Not kept."""

    def close(self, status: Status, errors: Sequence[str] = ()) -> None:
        """Nothing to end."""
