"""The run folder: what a run leaves on disk, written while it happens.

`pipeline.yaml` is the resolved pipeline, `metrics.jsonl` has one flat object a step, `events.jsonl` one object a block
of a node instance, and `log.txt` every note and every failed row with the time. Each line is in the file when the call
returns, so that a killed run can still be explained.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TextIO

from flowrl.encode import dumps
from flowrl.metrics import Failure
from flowrl.run_files import write_text
from flowrl.schedule.record import Event, Level, Recorder, Status

Note = Callable[[str, Level], None]
"""How a recorder tells the others about trouble of its own."""


class RunFolder:
    """A new folder `<root>/<name>-<YYYYmmdd-HHMMSS>`; a number follows where two runs start in the same second.

    A run that goes on has an `existing` one. Raises OSError if it cannot be made: a run without a folder should not
    start.
    """

    def __init__(self, root: Path, name: str, existing: Path | None = None) -> None:
        if existing is not None:
            self.path = existing.absolute()
            self.root = self.path.parent
            return
        self.root = root.absolute()
        self.root.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^\w.-]+", "_", name).strip(".") or "run"
        self.path = _make_new(self.root / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}")


def _make_new(wanted: Path) -> Path:
    path, number = wanted, 1
    while True:
        try:
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
            path = wanted.with_name(f"{wanted.name}-{number}")


class FolderRecorder(Recorder):
    """Writes the files of a run folder; a full disk is noted once and never stops the run."""

    def __init__(self, folder: RunFolder, resolved: str, note: Note) -> None:
        self._note = note
        self._broken = False
        self._tracebacks: set[str] = set()
        self._files: dict[str, TextIO] = {}
        self._folder = folder.path
        try:
            write_text(self._folder / "pipeline.yaml", resolved.rstrip("\n") + "\n")
        except OSError as error:
            self._report(error)

    def event(self, event: Event) -> None:
        """One line of `events.jsonl`; the failed rows are also named in `log.txt`, with the traceback."""
        failures = [{"rows": failure.rows, "error": failure.error} for failure in event.failures]
        self._write("events.jsonl", dumps({**vars(event), "failures": failures}))
        for failure in event.failures:
            rows = ", ".join(failure.rows) or "no row in particular"
            self._log(f"failed: step {event.step}, node {event.node}, worker {event.worker}, {rows}: {failure.error}")
            self._log_traceback(failure)

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """One line of `metrics.jsonl`: `step`, then the metrics by name; NaN is null."""
        self._write("metrics.jsonl", dumps({"step": step} | dict(sorted(metrics.items())) | {"step": step}))

    def note(self, text: str, level: Level = "info") -> None:
        """One entry of `log.txt`."""
        self._log(f"{level}: {text}")

    def stage(self, text: str) -> None:
        """What the run is waiting for while it starts, in `log.txt`: shows later where the time went."""
        self._log(f"stage: {text}")

    def close(self, status: Status, errors: Sequence[str] = ()) -> None:
        """Write the end of the run and close the files."""
        for error in errors:
            self._log(f"error: {error}")
        self._log(f"run {status}")
        for file in self._files.values():
            try:
                file.close()
            except OSError as error:
                self._report(error)
        self._files.clear()

    def _log(self, text: str) -> None:
        body = text.replace("\n", "\n    ")
        self._write("log.txt", f"{datetime.now().isoformat(sep=' ', timespec='milliseconds')} {body}")

    def _log_traceback(self, failure: Failure) -> None:
        """The traceback, but only the first from the same lines of code: a reward may fail on every row alike."""
        frames = "\n".join(line for line in failure.traceback.splitlines() if line.startswith("  File"))
        if failure.traceback and frames not in self._tracebacks:
            self._tracebacks.add(frames)
            self._log(failure.traceback.rstrip("\n"))

    def _write(self, name: str, line: str) -> None:
        try:
            if name not in self._files:
                # Line buffering puts every line on disk at once; "replace" lets lone surrogates of a model's text pass.
                self._files[name] = (self._folder / name).open("a", buffering=1, encoding="utf-8", errors="replace")
            self._files[name].write(line + "\n")
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._broken:
            self._broken = True
            self._note(f"cannot write to the run folder {self._folder}: {error}; the run goes on", "warning")
