"""TensorBoard: event files, written by TensorBoard's own writer, which needs neither torch nor TensorFlow."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from flowrl.schedule.record import Samples, Status
from flowrl.track.names import escaped
from flowrl.track.tracker import Complain, Point, Service

MAX_SHOWN, MAX_CELL = 8, 400
"""Rows of samples in a text, and characters of a cell."""
# A tag is UTF-8, which a lone surrogate has none of; its page draws no control characters. The colon is our escape.
REFUSED = re.compile("[:\x00-\x1f\x7f\ud800-\udfff]")


class Tensorboard(Service):
    """The event file of one run; a resumed run adds another, which takes the place of later steps of the first."""

    local = True

    def __init__(self, folder: Path, resumed_after: int | None = None) -> None:
        """`folder` holds this run alone; `resumed_after` is the step after which a resumed run goes on."""
        self._folder, self._resumed_after = folder, resumed_after
        self.shown = f"TensorBoard in {folder}"
        self._writer: Any = None

    def connect(self, run_id: str, complain: Complain) -> str:
        """Import what is needed; a file is made with the first values."""
        import tensorboard.summary.writer.record_writer  # noqa: F401

        return ""

    def send(self, points: Sequence[Point]) -> None:
        """One event for each step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for (step, milliseconds), group in groupby(points, key=lambda point: (point.step, point.milliseconds)):
            values = [Summary.Value(tag=escaped(p.name, REFUSED), simple_value=p.value) for p in group]
            self._write(step, milliseconds / 1000, summary=Summary(value=values))
        self._flush()

    def show(self, samples: Samples) -> None:
        """The first rows as a text."""
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING
        from tensorboard.plugins.text.plugin_data_pb2 import TextPluginData

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        text = TensorProto(dtype=DT_STRING, string_val=[markdown(samples).encode()], tensor_shape=shape)
        plugin = SummaryMetadata.PluginData(plugin_name="text", content=TextPluginData(version=0).SerializeToString())
        value = Summary.Value(tag="samples", metadata=SummaryMetadata(plugin_data=plugin), tensor=text)
        self._write(samples.step, time.time(), summary=Summary(value=[value]))
        self._flush()

    def end(self, status: Status) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _write(self, step: int, seconds: float, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            self._open()
        try:
            self._writer.write(Event(step=step, wall_time=seconds, **content).SerializeToString())
        except OSError:
            self._writer = None  # half a record ends a file: go on in a new one
            raise

    def _flush(self) -> None:
        try:
            self._writer.flush()
        except OSError:
            self._writer = None
            raise

    def _open(self) -> None:
        """A new file, with a name of the form that TensorBoard looks for."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        writer = RecordWriter((self._folder / name).open("xb"))
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        if self._resumed_after is not None:
            # TensorBoard forgets what other files say of this step and later ones.
            begun = SessionLog(status=SessionLog.START)
            event = Event(wall_time=now, step=self._resumed_after + 1, session_log=begun)
            writer.write(event.SerializeToString())
        self._writer = writer


def markdown(samples: Samples) -> str:
    """The first rows as a table in Markdown, long cells cut."""
    lines = [list(samples.columns), ["---"] * len(samples.columns), *samples.rows[:MAX_SHOWN]]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    text = text if len(text) <= MAX_CELL else text[:MAX_CELL] + "..."
    return re.sub(r"\s*\n\s*", " ", text.replace("\\", "\\\\").replace("|", "\\|"))
