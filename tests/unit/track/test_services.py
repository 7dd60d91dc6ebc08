"""TensorBoard, wandb (offline) and the samples of the run folder: what they hold after a run, and a resumed one."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from flowrl.schedule.record import Samples
from flowrl.spec.tracking import TensorboardTracking, Tracking, WandbTracking
from flowrl.track import Recorders, RunFolder, make_recorders, missing_package
from flowrl.track.tensorboard import markdown
from flowrl.track.tracker import brief

OFFLINE = WandbTracking(mode="offline", project="a/b")
VALUES = {"val/acc@4": 1.0, "time(s)": 2.0, "größe": 3.0, "bad\ud800": 4.0, "_hidden": 5.0, "nan": float("nan")}
TABLE = Samples(
    2,
    {"step": [2, 2], "response": ["a|b\nc", "größe \U0001f600"], "reward": [None, float("inf")], "good": [True, None]},
    {"step": "int", "response": "str", "reward": "float", "good": "bool"},
)


def recorders_of(folder: RunFolder, stream: io.StringIO, *specs: Tracking, after: int | None = None) -> Recorders:
    params = {"batch": {"prompts": 32}, "bad\ud800": {"x": np.float32(1.5)}}
    return make_recorders(
        specs, folder, name="grpo", resolved="name: grpo\n", params=params, graph="graph TD", stream=stream,
        resumed_after=after,
    )  # fmt: skip


def run(folder: RunFolder, *specs: Tracking, steps: range = range(1, 4), after: int | None = None) -> str:
    """A run of some steps, and what it said."""
    stream = io.StringIO()
    recorders = recorders_of(folder, stream, *specs, after=after)
    for step in steps:
        recorders.step(step, steps.stop, VALUES | {"reward/mean": float(np.float32(step / 4)), "attempt": len(steps)})
        if step == TABLE.step:
            recorders.samples(TABLE)
    recorders.close("finished")
    until_written(folder.path)
    return stream.getvalue()


def until_written(folder: Path) -> None:
    """Wait for the process that writes what wandb was told: the last it writes of a run is its exit."""
    ends, runs = time.monotonic() + 30, len(list(folder.glob("wandb/offline-run-*")))
    while [one.WhichOneof("record_type") for one in records(folder)].count("exit") < runs and time.monotonic() < ends:
        time.sleep(0.05)


def events(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def records(folder: Path) -> Iterator[Any]:
    """What wandb has written for `wandb sync`: LevelDB's log format, blocks of 32 KiB after a header of 7 bytes."""
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, position, part = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            left = 32768 - position % 32768
            if left < 7:
                position += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, position)
            part += data[position + 7 : position + 7 + size]
            position += 7 + size
            if kind in (1, 4):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(part)
                part = b""
                yield record


def history(folder: Path) -> list[dict[str, Any]]:
    """wandb's history, without what it adds of its own."""
    kept = [record.history for record in records(folder) if record.WhichOneof("record_type") == "history"]
    rows = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in kept]
    return [{name: value for name, value in row.items() if name[0] != "_"} for row in rows]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    folder = RunFolder(tmp_path_factory.mktemp("runs"), "grpo")
    return folder, run(folder, TensorboardTracking(), OFFLINE)


def test_nothing_is_complained_of(finished: tuple[RunFolder, str]) -> None:
    assert "warning" not in finished[1]


def test_tensorboard_has_the_metrics_and_the_samples(finished: tuple[RunFolder, str]) -> None:
    found = events(finished[0].path / "tensorboard")
    tags = found.Tags()
    assert set(tags["scalars"]) == {*VALUES, "reward/mean", "attempt"} - {"bad\ud800", "nan"} | {"bad:d800:"}
    assert [(event.step, event.value) for event in found.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    (text,) = found.Tensors("samples")
    assert text.step == 2
    assert "größe" in text.tensor_proto.string_val[0].decode()


def test_wandb_has_the_metrics_the_settings_and_the_samples_without_a_network(finished: tuple[RunFolder, str]) -> None:
    folder = finished[0].path
    rows = history(folder)
    steps = [row for row in rows if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in steps] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert set(steps[0]) == {
        "val/acc@4",
        "time(s)",
        "größe",
        "bad:d800:",
        ":5f:hidden",
        "reward/mean",
        "attempt",
        "step",
    }
    (table,) = (folder / "wandb").rglob("*.table.json")
    assert json.loads(table.read_text())["data"][1][1] == "größe \U0001f600"
    (started,) = (record.run for record in records(folder) if record.WhichOneof("record_type") == "run")
    assert started.project == "a-b"
    assert started.display_name == folder.name
    config = {item.key: json.loads(item.value_json) for item in started.config.update}
    assert config["batch"] == {"prompts": 32}
    assert [record.exit.exit_code for record in records(folder) if record.WhichOneof("record_type") == "exit"] == [0]


def test_the_run_folder_has_the_samples_with_their_types(finished: tuple[RunFolder, str]) -> None:
    table = pq.read_table(finished[0].path / "samples" / "step_000002.parquet")
    assert [str(field.type) for field in table.schema] == ["int64", "string", "double", "bool"]
    assert table.to_pydict() == {name: list(values) for name, values in TABLE.columns.items()}


def test_a_resumed_run_takes_the_place_of_what_came_after(finished: tuple[RunFolder, str]) -> None:
    folder = finished[0]
    stray = folder.path / "samples" / "step_000009.parquet"
    stray.write_bytes(b"")
    time.sleep(1)  # wandb names its folder after the second
    said = run(folder, TensorboardTracking(), OFFLINE, steps=range(3, 5), after=2)
    assert "warning" not in said
    assert not stray.exists()
    assert (folder.path / "samples" / "step_000002.parquet").exists()
    found = events(folder.path / "tensorboard").Scalars("attempt")
    assert [(event.step, event.value) for event in found] == [(1, 3), (2, 3), (3, 2), (4, 2)]
    started = [record.run.run_id for record in records(folder.path) if record.WhichOneof("record_type") == "run"]
    assert len(started) == 2, list(folder.path.glob("wandb/*"))
    assert len(set(started)) == 1
    assert [row["step"] for row in history(folder.path) if "attempt" in row] == [1, 2, 3, 3, 4]


def test_a_folder_of_ones_own_holds_a_folder_for_each_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs", "grpo")
    run(folder, TensorboardTracking(dir=str(tmp_path / "all")))
    assert events(tmp_path / "all" / folder.path.name).Tags()["scalars"]


def test_trackers_that_cannot_write_are_a_note_each(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "grpo")
    for name in ("tensorboard", "samples"):
        (folder.path / name).write_text("a file where the folder should be")
    said = run(folder, TensorboardTracking())
    assert said.count("warning: ") == 2
    assert "training goes on" in said
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 3


def test_wandb_without_a_key_is_one_note_and_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    start = time.monotonic()
    said = run(RunFolder(tmp_path, "grpo"), WandbTracking())
    assert said.count("warning: ") == 1
    assert "no API key: `wandb login`, WANDB_API_KEY, or mode: offline" in said
    assert time.monotonic() - start < 15


def test_wandb_switched_off_leaves_nothing_and_needs_nothing(tmp_path: Path) -> None:
    folder, spec = RunFolder(tmp_path, "grpo"), WandbTracking(mode="disabled")
    run(folder, spec)
    assert not (folder.path / "wandb").exists()
    assert missing_package(spec) == ""


def test_a_server_that_is_away_does_not_hold_up_the_end_of_the_process(tmp_path: Path) -> None:
    """The interpreter waits for wandb's own process when it exits."""
    script = f"""
import sys, io, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_services import *
print(run(RunFolder(Path({str(tmp_path)!r}), "grpo"), WandbTracking()))
"""
    environment = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "HOME": str(tmp_path)}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=100,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning: ") in (1, 2)
    assert time.monotonic() - start < 45


def test_a_text_of_samples_is_one_line_a_row() -> None:
    lines = markdown(TABLE).splitlines()
    assert lines[2] == "| 2 | a\\|b c |  | True |"
    assert len(lines) == 4


def test_the_drivers_side_of_tensorboard_needs_no_torch(tmp_path: Path) -> None:
    script = f"""
import sys
from flowrl.track.tensorboard import Tensorboard
from flowrl.track.tracker import Point
made = Tensorboard(__import__("pathlib").Path({str(tmp_path)!r}))
made.connect("", print)
made.send([Point("a", 1.0, 0, 1)])
print({{"torch", "tensorflow"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


def test_a_message_is_its_first_line() -> None:
    assert brief(ValueError("one\ntwo")) == "ValueError: one"
    assert brief(ValueError()) == "ValueError: "
