"""Recorders of a run: the run folder, the console, and trackers such as MLflow, joined into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO

from flowrl.schedule.record import Event, Level, Recorder, Status
from flowrl.spec.document import MlflowTracking, TrackingSpec
from flowrl.track.record import FolderRecorder, RunFolder

__all__ = ["FolderRecorder", "Recorders", "RunFolder", "make_recorders"]


class Recorders:
    """Several recorders as one that never raises: a recorder that does is dropped, and the others are told why."""

    def __init__(self, recorders: Iterable[Recorder] = ()) -> None:
        self._recorders = list(recorders)

    def add(self, recorder: Recorder) -> None:
        """One more, called after those already there."""
        self._recorders.append(recorder)

    def event(self, event: Event) -> None:
        """A block of a node instance has ended."""
        self._each(lambda recorder: recorder.event(event))

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """A step (from 1) has ended."""
        self._each(lambda recorder: recorder.step(step, num_steps, metrics))

    def note(self, text: str, level: Level = "info") -> None:
        """Something a person should read."""
        self._each(lambda recorder: recorder.note(text, level))

    def stage(self, text: str) -> None:
        """What the run is waiting for before its first step, for those who show it."""
        self._each(lambda recorder: recorder.stage(text))

    def close(self, status: Status, errors: Sequence[str] = ()) -> None:
        """The run has ended; a second call does nothing."""
        self._each(lambda recorder: recorder.close(status, errors))
        self._recorders.clear()

    def _each(self, call: Callable[[Recorder], None]) -> None:
        for recorder in tuple(self._recorders):
            try:
                call(recorder)
            except Exception as error:  # whatever it is, it must not stop training
                if recorder in self._recorders:
                    self._recorders.remove(recorder)
                    self.note(f"{type(recorder).__name__} stopped: {type(error).__name__}: {error}", "warning")


def make_recorders(
    tracking: Iterable[TrackingSpec],
    folder: RunFolder,
    *,
    name: str,
    resolved: str,
    params: Mapping[str, Any],
    graph: str,
    stream: TextIO | None = None,
) -> Recorders:
    """The recorders of a run.

    `resolved` is the text of the resolved pipeline, `params` the same as nested mappings, `graph` its picture in
    Mermaid. Lines for a person go to `stream`, or to standard output.
    """
    # Rich takes 0.1 s to import, which commands that run nothing should not pay.
    from flowrl.track.console import ConsoleRecorder
    from flowrl.track.mlflow import MlflowRecorder

    recorders = Recorders()
    artifacts = {"pipeline.yaml": resolved, "graph.mmd": graph}
    for spec in tracking:
        if isinstance(spec, MlflowTracking):
            mlflow = MlflowRecorder(
                folder,
                experiment=spec.experiment or name,
                uri=spec.uri,
                params=params,
                artifacts=artifacts,
                note=recorders.note,
            )
            recorders.add(mlflow)
    # In this order, so that what a tracker says at the end is still shown, and everything lies in the run folder.
    recorders.add(ConsoleRecorder(name, folder.path, stream))
    recorders.add(FolderRecorder(folder, resolved, recorders.note))
    return recorders
