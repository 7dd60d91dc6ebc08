"""The metrics of a run in memory, for the caller of `Pipeline.run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flowrl.schedule.record import Recorder


class History(Recorder):
    """Keeps the metrics of every step."""

    def __init__(self, before: Sequence[tuple[int, Mapping[str, float]]] = ()) -> None:
        """`before` are steps that earlier attempts at the run have made, each with its metrics."""
        self.metrics: list[Mapping[str, float]] = []
        self.before_training: Mapping[str, float] = {}
        for step, metrics in before:
            self.step(step, 0, metrics)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics; those of step 0 apart."""
        if step:
            self.metrics.append(dict(metrics))
        else:
            self.before_training = dict(metrics)
