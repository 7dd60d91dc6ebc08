"""Recorders of a run: the run folder, the console, and trackers such as MLflow, joined into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from flowrl.schedule.record import Event, Level, Recorder, Samples, Status
from flowrl.spec.tracking import EXTRAS, MlflowTracking, TensorboardTracking, Tracking, WandbTracking
from flowrl.track.record import FolderRecorder, RunFolder

if TYPE_CHECKING:
    from flowrl.track.tracker import Service

__all__ = ["FolderRecorder", "Recorders", "RunFolder", "make_recorders", "missing_package"]


class Recorders(Recorder):
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

    def samples(self, samples: Samples) -> None:
        """Some trajectories of a step."""
        self._each(lambda recorder: recorder.samples(samples))

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
    tracking: Iterable[Tracking],
    folder: RunFolder,
    *,
    name: str,
    resolved: str,
    params: Mapping[str, Any],
    graph: str,
    stream: TextIO | None = None,
    resumed_after: int | None = None,
) -> Recorders:
    """The recorders of a run.

    `resolved` is the text of the resolved pipeline, `params` the same as nested mappings, `graph` its picture in
    Mermaid. Lines for a person go to `stream`, or to standard output. `resumed_after` is the step after which the run
    of this folder goes on, -1 to begin again: trackers then go on with the runs that they had made.
    """
    # Rich takes 0.1 s to import, which commands that run nothing should not pay.
    from flowrl.track.console import ConsoleRecorder
    from flowrl.track.samples import SampleFiles
    from flowrl.track.tracker import Ending, RunIds, Tracker

    recorders, ending = Recorders(), Ending()
    ids = RunIds(folder.path, resumed=resumed_after is not None)
    artifacts = {"pipeline.yaml": resolved, "graph.mmd": graph}
    for service in _services(tracking, folder, name, params, artifacts, resumed_after):
        recorders.add(Tracker(service, ids, ending, recorders.note))
    recorders.add(Tracker(SampleFiles(folder.path / "samples", resumed_after), ids, ending, recorders.note))
    # In this order, so that what a tracker says at the end is still shown, and everything lies in the run folder.
    recorders.add(ConsoleRecorder(name, folder.path, stream))
    recorders.add(FolderRecorder(folder, resolved, recorders.note))
    return recorders


def _services(
    tracking: Iterable[Tracking],
    folder: RunFolder,
    name: str,
    params: Mapping[str, Any],
    artifacts: Mapping[str, str],
    resumed_after: int | None,
) -> Iterator[Service]:
    from flowrl.track.mlflow import Mlflow
    from flowrl.track.tensorboard import Tensorboard
    from flowrl.track.wandb import Wandb

    for spec in tracking:
        if isinstance(spec, MlflowTracking):
            experiment = spec.experiment or name
            yield Mlflow(folder, experiment=experiment, uri=spec.uri, params=params, artifacts=artifacts)
        elif isinstance(spec, TensorboardTracking):
            own = folder.path / "tensorboard" if spec.dir is None else Path(spec.dir).absolute() / folder.path.name
            yield Tensorboard(own, resumed_after)
        elif isinstance(spec, WandbTracking) and spec.mode != "disabled":
            yield Wandb(spec, folder.path, project=name, params=params)


def missing_package(spec: Tracking) -> str:
    """How to install what a tracker needs and this machine lacks; empty where all is there."""
    off = isinstance(spec, WandbTracking) and spec.mode == "disabled"
    if off or not spec.package or find_spec(spec.package) is not None:
        return ""
    return f"pip install 'flowrl[{spec.package}]'" if spec.package in EXTRAS else f"pip install {spec.package}"
