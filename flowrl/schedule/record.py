"""What the engine tells whoever listens: events of node instances, metrics of steps, notes, and the end.

`flowrl.track` implements `Recorder`; `flowrl.pipeline` plugs it in. A recorder never raises: what it cannot write down
must not stop training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.fields import Dtype
from flowrl.metrics import Failure

Level = Literal["info", "warning", "error", "traceback"]
Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True)
class Event:
    """One block of one node instance: enough to answer who wrote a value, from what, and under which weights."""

    step: int
    node: str
    attempt: int
    worker: str
    """`pool/rank`."""
    version: int
    """Version of the weights used; of a sync, the one that it has sent."""
    rows: tuple[str, ...]
    start: float
    """Seconds since the epoch."""
    end: float
    bytes_in: int
    bytes_out: int
    reads: tuple[str, ...]
    """Fields read."""
    writes: tuple[str, ...]
    """Fields written."""
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Samples:
    """Some trajectories of a step as a table for people: native values, None where there is none."""

    step: int
    columns: Mapping[str, Sequence[Any]]
    """Values by column, one per trajectory."""
    types: Mapping[str, Dtype]
    """Type of each column: `int`, `float`, `bool` or `str`."""

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """The table row by row."""
        return list(zip(*self.columns.values(), strict=True))


class Recorder:
    """Listens to a run; what it does not override is not for it."""

    def event(self, event: Event) -> None:
        """A block of a node instance has ended."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A step (from 1) has ended; metric names as in the run folder. Step 0 is what was measured before training."""

    def samples(self, samples: Samples) -> None:
        """Some trajectories of a step, which may come while the next ones run."""

    def note(self, text: str, level: Level = "info") -> None:
        """Something a person should read."""

    def stage(self, text: str) -> None:
        """What the run is waiting for before its first step."""

    def close(self, status: Status, errors: Sequence[str] = ()) -> None:
        """The run has ended."""
