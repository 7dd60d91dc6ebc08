"""Several trackers at once on real Ray: all say the same, samples lie in the run folder, and nothing stays running."""

from __future__ import annotations

from pathlib import Path

import pyarrow.dataset
import pytest
from mlflow import MlflowClient
from runs import FAKE, Finished, finish, gone
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MLFLOW = "{type: mlflow, experiment: all}, {type: mlflow, experiment: again}"
TRACKING = f"tracking=[{MLFLOW}, {{type: tensorboard}}, {{type: wandb, mode: offline}}]"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "fake.yaml").write_text(FAKE)
    sets = ("--set", "run.steps=4", "--set", "run.samples={rows: 10, every: 3}", "--set", TRACKING)
    done = finish(folder, "run", "fake.yaml", *sets)
    assert done.code == 0, done.out + done.err
    return done


def test_nothing_is_said_of_trackers_that_work_and_nothing_stays(run: Finished) -> None:
    assert not any(name in run.out for name in ("MLflow at", "TensorBoard in", "samples in", "training goes on"))
    assert "wandb" not in run.out + run.err
    assert gone(run.folder)


def test_all_trackers_have_what_the_run_folder_has(run: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {name: [line[name] for line in run.metrics] for name in run.metrics[0] if name != "step"}
    events = EventAccumulator(str(run.run / "tensorboard"))
    events.Reload()
    for name, values in expected.items():
        points = [(event.step, event.value) for event in events.Scalars(name)]
        assert points == [(step, pytest.approx(value)) for step, value in enumerate(values, 1)], name
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run.folder / 'runs' / 'mlflow.db'}")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("all")
    assert experiment is not None
    (logged,) = client.search_runs([experiment.experiment_id])
    assert logged.info.status == "FINISHED"
    assert set(logged.data.metrics) == set(expected)
    table = client.load_table(experiment.experiment_id, "samples/step_000001.json", [logged.info.run_id])
    assert len(table) == 12
    assert list((run.run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(list((run.run / "wandb").rglob("*.table.json"))) == 2


def test_the_samples_of_a_run_are_one_table(run: Finished) -> None:
    table = pyarrow.dataset.dataset(run.run / "samples").to_table().to_pandas()
    assert table.groupby("step").size().to_dict() == {1: 12, 3: 12}
    assert table.reward.notna().all()
    assert (table.response_length > 0).all()
    scored = table.groupby("step").reward.mean()
    assert len(scored) == 2


def test_the_names_of_section_13_are_there(run: Finished) -> None:
    """Those of the update are in the tests of the default pipeline."""
    assert run.metrics[0].keys() >= {
        "reward/mean", "advantage/abs", "groups/size", "rollout/tokens", "rollout/response_length/mean",
        "rollout/response_length/min", "rollout/response_length/max", "rollout/finish/length", "staleness/mean",
        "staleness/max", "time/rollout", "time/step", "time/engine", "throughput/tokens_per_s",
    }  # fmt: skip
    assert [line["staleness/max"] for line in run.metrics] == [0.0] * 4


def test_each_run_folder_names_the_runs_of_its_trackers(run: Finished) -> None:
    text = Path(run.run / "trackers.json").read_text()
    assert '"wandb project fake"' in text
    assert "mlflow.db, experiment all" in text
    assert "mlflow.db, experiment again" in text
