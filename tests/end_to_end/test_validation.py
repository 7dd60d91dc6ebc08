"""Validation in runs of the real command: on Ray and in this process, with the fake engine and with a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from runs import DEFAULT, FAKE, Finished, finish, gone

VAL = FAKE.replace("size: 64}}", "size: 64}, val: {type: arithmetic, size: 5, seed: 1}}").replace(
    "prompts: 8, group: 4", "prompts: 2, group: 2"
)
ACCURACY = "  accuracy: {use: evaluate.accuracy, every: 2, samples: 4, temperature: 0, before_training: true}\n"


def measures(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name.startswith("val/")}


@pytest.mark.parametrize("where", [[], ["--local"]])
def test_five_rows_at_batch_2_are_all_scored(where: list[str], flowrl: Callable[..., Finished], tmp_path: Path) -> None:
    (tmp_path / "val.yaml").write_text(VAL.replace("run:", ACCURACY + "run:"))
    script = "nodes.rollout.script.texts=['48', null, '29', '1']"
    run = flowrl("run", "val.yaml", "--steps", "3", "--set", script, "--set", "pools.generate.workers=2", *where)
    assert run.code == 0, run.out + run.err
    assert [line["step"] for line in run.metrics] == [0, 1, 2, 3]
    assert [bool(measures(line)) for line in run.metrics] == [True, False, True, False]
    assert measures(run.metrics[0]) == measures(run.metrics[2])
    assert measures(run.metrics[2])["val/arithmetic/rows"] == 5
    assert measures(run.metrics[2])["val/arithmetic/unscored"] == 5
    theirs = [event for event in run.events if any(row.startswith("val:") for row in event["rows"])]
    rows = [row for event in theirs if event["node"] == "accuracy" for row in event["rows"]]
    assert sorted(rows) == sorted([f"val:u{row}_{session}_0" for row in range(5) for session in (0, 2, 3)] * 2)
    assert {event["node"] for event in theirs} == {"rollout", "reward", "accuracy"}
    assert run.out.count("val/arithmetic  mean@4") == 2
    assert "first validation" in run.out
    assert gone(tmp_path)


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("validated")
    done = finish(folder, "run", "grpo_validation", "--steps", "4", "--set", "nodes.accuracy.every=2",
                  "--set", "data.val.size=64")  # fmt: skip
    assert done.code == 0, done.out + done.err
    return done


def test_a_model_is_validated_before_training_and_on_its_way(validated: Finished) -> None:
    found = [measures(line) for line in validated.metrics]
    assert [bool(one) for one in found] == [True, False, True, False, True]
    for one in (one for one in found if one):
        assert one["val/arithmetic/rows"] == 64 and one["val/arithmetic/unscored"] == 0
        assert one["val/arithmetic/mean@4"] == pytest.approx(one["val/arithmetic/pass@1"])
        assert one["val/arithmetic/pass@1"] <= one["val/arithmetic/pass@2"] <= one["val/arithmetic/pass@4"] <= 1
    versions = {(event["step"], event["version"]) for event in validated.events
                if event["node"] == "rollout" and event["rows"][0].startswith("val:")}  # fmt: skip
    assert versions == {(0, 0), (2, 2), (4, 4)}


def test_validation_changes_nothing_of_training(validated: Finished, tmp_path: Path) -> None:
    without = finish(tmp_path, "run", DEFAULT, "--steps", "4", "--set", "tracking=null")
    assert without.code == 0, without.out + without.err
    same = ("reward/mean", "rollout/tokens", "rollout/response_length/mean", "actor/grad_norm", "actor/loss")
    for ours, theirs in zip(without.metrics, validated.metrics[1:], strict=True):
        assert {name: ours[name] for name in same} == {name: theirs[name] for name in same}


def test_the_trackers_get_step_0_as_well(validated: Finished) -> None:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{validated.folder / 'runs' / 'mlflow.db'}")
    (experiment,) = [one for one in client.search_experiments() if one.name == "grpo-arithmetic"]
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "val/arithmetic/mean:at:4")
    assert [point.step for point in history] == [0, 2, 4]
