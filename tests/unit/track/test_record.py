"""The run folder and the join of several recorders."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.metrics import Failure, failure_of
from flowrl.schedule.record import Event, Level
from flowrl.track import FolderRecorder, Recorders, RunFolder


class Told(Recorders):
    """A recorder that keeps the notes."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def note(self, text: str, level: Level = "info") -> None:
        self.texts.append(text)


class Raises(Recorders):
    """A recorder that breaks its promise."""

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        raise ValueError("no more")


def an_event(*failures: Failure, step: int = 1) -> Event:
    rows, reads, writes = ("u1_0_0", "u1_1_0"), ("response",), ("reward",)
    return Event(step, "reward", 1, "cpu/0", 7, rows, 1.5, 2.5, 10, 20, reads, writes, failures)


def failures_of_rows(num: int) -> list[Failure]:
    failures = []
    for row in range(num):
        try:
            raise ValueError(f"row {row} is wrong")
        except ValueError as error:
            failures.append(failure_of([f"u{row}_0_0"], error))
    return failures


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_two_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    paths = [RunFolder(tmp_path / "runs", "grpo/sync").path for _ in range(4)]
    assert len(set(paths)) == 4
    for path in paths:
        assert path.is_dir()
        assert path.parent == tmp_path / "runs"
        assert path.name.startswith("grpo_sync-")


def test_metrics_are_one_flat_object_a_step_that_is_on_disk_at_once(tmp_path: Path) -> None:
    folder, told = RunFolder(tmp_path, "x"), Told()
    recorder = FolderRecorder(folder, "name: x\n", told.note)
    values: dict[str, Any] = {
        "z": np.float32(0.5),
        "a": math.nan,
        "val/größe@4": np.int64(3),
        "bad\ud800": np.bool_(True),
    }
    recorder.step(1, 2, values | {"step": 9.0})
    assert lines(folder.path / "metrics.jsonl") == [{"step": 1, "a": None, "bad?": True, "val/größe@4": 3, "z": 0.5}]
    assert list(lines(folder.path / "metrics.jsonl")[0]) == ["step", "a", "bad?", "val/größe@4", "z"]
    recorder.step(2, 2, {})
    assert lines(folder.path / "metrics.jsonl")[1] == {"step": 2}
    assert (folder.path / "pipeline.yaml").read_text() == "name: x\n"
    recorder.close("finished")
    assert not told.texts


def test_an_event_is_a_line_and_its_failed_rows_are_named_in_the_log(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "x")
    recorder = FolderRecorder(folder, "", Told().note)
    recorder.event(an_event(*failures_of_rows(3), Failure((), "Timeout: 3 s")))
    recorder.note("first\nsecond \ud800", "warning")
    recorder.close("failed", ["it stopped"])
    (event,) = lines(folder.path / "events.jsonl")
    assert event["node"] == "reward"
    assert event["rows"] == ["u1_0_0", "u1_1_0"]
    assert event["version"] == 7
    assert event["reads"] == ["response"]
    assert event["writes"] == ["reward"]
    assert event["worker"] == "cpu/0"
    assert event["failures"] == [
        *({"rows": [f"u{row}_0_0"], "error": f"ValueError: row {row} is wrong"} for row in range(3)),
        {"rows": [], "error": "Timeout: 3 s"},
    ]
    log = (folder.path / "log.txt").read_text(encoding="utf-8")
    for row in range(3):
        assert f"step 1, node reward, worker cpu/0, u{row}_0_0: ValueError: row {row} is wrong" in log
    assert log.count("Traceback") == 1, "the same lines of code are shown once"
    assert "warning: first\n    second ?" in log
    assert "error: it stopped" in log
    assert "run failed" in log


def test_a_full_disk_is_noted_once_and_raises_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "x")
    (folder.path / "events.jsonl").symlink_to("/dev/full")
    (folder.path / "log.txt").symlink_to("/dev/full")
    notes = Told()
    recorders = Recorders([notes])
    recorders.add(FolderRecorder(folder, "", recorders.note))
    for step in (1, 2):
        recorders.event(an_event(*failures_of_rows(1)))
        recorders.step(step, 2, {"reward/mean": 0.5})
    recorders.close("finished")
    assert len(notes.texts) == 1
    assert "No space left" in notes.texts[0]
    assert str(folder.path) in notes.texts[0]
    assert [line["step"] for line in lines(folder.path / "metrics.jsonl")] == [1, 2]


def test_a_recorder_that_raises_is_dropped_and_the_others_are_told_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "x")
    recorders = Recorders()
    recorders.add(Raises())
    recorders.add(FolderRecorder(folder, "", recorders.note))
    for step in (1, 2, 3):
        recorders.stage("loading")
        recorders.step(step, 3, {"reward/mean": 0.5})
    recorders.close("finished")
    recorders.close("finished")
    assert len(lines(folder.path / "metrics.jsonl")) == 3
    log = (folder.path / "log.txt").read_text()
    assert log.count("Raises stopped: ValueError: no more") == 1
    assert log.count("run finished") == 1


def test_importing_the_package_loads_neither_rich_nor_mlflow() -> None:
    code = "import sys, flowrl.track; print([name for name in ('rich', 'mlflow', 'ray') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
