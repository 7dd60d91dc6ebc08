"""MLflow: what its store holds after a run, and what happens when it is away."""

from __future__ import annotations

import io
import math
import re
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.utils.validation import _validate_metric_name

from flowrl.schedule.record import Status
from flowrl.spec.tracking import MlflowTracking, NoTracking
from flowrl.track import Recorders, RunFolder, make_recorders, tracker
from flowrl.track.mlflow import REFUSED, flat
from flowrl.track.names import escaped, unescaped

LONG = "x" * 7000


def recorders_of(folder: RunFolder, stream: io.StringIO, *specs: MlflowTracking | NoTracking) -> Recorders:
    params = {"batch": {"prompts": 32, "group": 8}, "nodes": {"reward@2": {"texts": ["ö", 1]}}, "note": LONG}
    return make_recorders(
        specs, folder, name="grpo", resolved="name: grpo\n", params=params, graph="graph TD", stream=stream
    )


def runs_at(uri: str, experiment: str) -> tuple[MlflowClient, list[Run]]:
    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return client, list(client.search_runs([found.experiment_id]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """A run of three steps into the default store, made once since a fresh store takes seconds."""
    folder, stream = RunFolder(tmp_path_factory.mktemp("runs"), "grpo"), io.StringIO()
    recorders = recorders_of(folder, stream, MlflowTracking(experiment="grpo"))
    # The close waits ten seconds at most; a busy machine may need longer for a fresh store.
    deadline = time.monotonic() + 60
    while not (folder.root / "mlartifacts").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    for step in range(1, 4):
        values = {"val/acc@4": 1.0, "time(s)": 2.0, "kl,mean": math.nan, "grad": math.inf, "größe": 3.0}
        recorders.step(step, 3, values | {"reward/mean": float(np.float32(step / 4)), "n" * 300: 1.0})
    recorders.close("finished")
    return folder, stream.getvalue()


def test_the_store_holds_metrics_under_reversible_names(finished: tuple[RunFolder, str]) -> None:
    folder, _ = finished
    client, (run,) = runs_at(f"sqlite:///{folder.root / 'mlflow.db'}", "grpo")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.path.name
    names = {unescaped(name) for name in run.data.metrics}
    assert names == {"reward/mean", "val/acc@4", "time(s)", "größe"}, "NaN and infinity leave a gap"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_the_store_holds_the_pipeline_and_its_picture(finished: tuple[RunFolder, str]) -> None:
    folder, _ = finished
    _, (run,) = runs_at(f"sqlite:///{folder.root / 'mlflow.db'}", "grpo")
    params = run.data.params
    assert params["batch.prompts"] == "32"
    assert params["nodes.reward:at:2.texts"] == '["ö", 1]'
    assert len(params["note"]) == 6000
    assert params["note"].endswith("x...")
    files = {path.name: path.read_text() for path in (folder.root / "mlartifacts").rglob("*") if path.is_file()}
    assert files == {"pipeline.yaml": "name: grpo\n", "graph.mmd": "graph TD"}


def test_a_name_too_long_for_mlflow_is_noted_once(finished: tuple[RunFolder, str]) -> None:
    _, text = finished
    assert text.count("warning:") == 1
    assert "does not get 'nnnn" in text
    assert "alembic" not in text


@pytest.mark.parametrize(("status", "expected"), [("failed", "FAILED"), ("interrupted", "KILLED")])
def test_a_run_that_did_not_finish_says_so(finished: tuple[RunFolder, str], status: Status, expected: str) -> None:
    first, _ = finished
    uri, folder = f"sqlite:///{first.root / 'mlflow.db'}", RunFolder(first.root, status)
    recorders = recorders_of(folder, io.StringIO(), MlflowTracking(experiment="other", uri=uri))
    recorders.step(1, 2, {"reward/mean": 0.5})
    recorders.close(status)
    _, runs = runs_at(uri, "other")
    assert {run.info.run_name: run.info.status for run in runs}[folder.path.name] == expected


@pytest.mark.parametrize("uri", ["http://user:secret@127.0.0.1:9", "sqlite:////proc/nowhere/mlflow.db", "nonsense://x"])
def test_a_tracker_that_cannot_be_reached_is_one_note_and_no_delay(tmp_path: Path, uri: str) -> None:
    folder, stream = RunFolder(tmp_path, "grpo"), io.StringIO()
    recorders = recorders_of(folder, stream, MlflowTracking(uri=uri), NoTracking())
    slowest = 0.0
    for step in range(1, 11):
        started = time.monotonic()
        recorders.step(step, 10, {"reward/mean": 0.5})
        slowest = max(slowest, time.monotonic() - started)
        time.sleep(0.02)
    started = time.monotonic()
    recorders.close("finished")
    assert slowest < 0.5
    assert time.monotonic() - started < 11
    warnings = [line for line in stream.getvalue().splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "training goes on" in warnings[0]
    assert "secret" not in warnings[0]
    assert len((folder.path / "metrics.jsonl").read_text().splitlines()) == 10


def test_a_server_that_never_answers_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracker.CLOSE_SECONDS, "finished", 0.5)
    folder, stream = RunFolder(tmp_path, "grpo"), io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as server:
        recorders = recorders_of(folder, stream, MlflowTracking(uri=f"http://127.0.0.1:{server.getsockname()[1]}"))
        recorders.step(1, 1, {"reward/mean": 0.5})
        started = time.monotonic()
        recorders.close("finished")
        assert time.monotonic() - started < 2
    assert stream.getvalue().count("warning") == 1
    assert "did not answer in time" in stream.getvalue()


def test_what_waited_is_sent_when_the_tracker_is_back(
    finished: tuple[RunFolder, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker, "RETRY_SECONDS", 0.1)
    store, folder, stream = tmp_path / "later", RunFolder(tmp_path, "grpo"), io.StringIO()
    store.write_text("a file where the folder should be")
    uri = f"sqlite:///{store / 'mlflow.db'}"
    recorders = recorders_of(folder, stream, MlflowTracking(experiment="later", uri=uri))
    recorders.step(1, 2, {"reward/mean": 0.25})
    deadline = time.monotonic() + 30
    while "warning" not in stream.getvalue() and time.monotonic() < deadline:
        recorders.step(2, 2, {"reward/mean": 0.5})
        time.sleep(0.1)
    store.unlink()
    store.mkdir()
    shutil.copy(finished[0].root / "mlflow.db", store)
    recorders.close("finished")
    client, (run,) = runs_at(uri, "later")
    assert client.get_metric_history(run.info.run_id, "reward/mean")[0].value == 0.25
    assert run.info.status == "FINISHED"
    assert stream.getvalue().count("warning") == 1


@given(st.text(max_size=30) | st.text(alphabet="./:a@ \n", max_size=8))
@example("bad\ud800")
@example("")
@example(":at:")
@example("..0")
def test_every_name_comes_back_and_is_one_that_mlflow_takes(name: str) -> None:
    mapped = escaped(name, REFUSED)
    assert unescaped(mapped) == name
    assert re.fullmatch(r"[/\w.\- :]+", mapped, re.ASCII)
    _validate_metric_name(mapped)  # type: ignore[no-untyped-call]


@given(st.text(max_size=10), st.text(max_size=10))
def test_two_names_never_clash(one: str, other: str) -> None:
    assert (escaped(one, REFUSED) == escaped(other, REFUSED)) == (one == other)


def test_parameters_are_flat_and_none_is_lost() -> None:
    document = {"a": {"b": {"c": 1, "d": None}}, "e": {}, "f": [1, {"g": True}], "h": "text"}
    assert dict(flat(document)) == {"a.b.c": "1", "a.b.d": "null", "e": "{}", "f": '[1, {"g": true}]', "h": "text"}
