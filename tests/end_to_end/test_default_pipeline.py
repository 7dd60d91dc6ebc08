"""The default pipeline for a few steps: it learns, records, and agrees with itself in every way of running it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import DEFAULT, Finished, finish

STEPS = ("--steps", "3", "--set", "tracking=null")
IDENTICAL = ("reward/mean", "rollout/tokens", "actor/grad_norm", "actor/loss", "mismatch/log_ratio")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = finish(
        tmp_path_factory.mktemp("default"), "run", DEFAULT, "--steps", "12", "--set", "nodes.weight_sync.verify=true"
    )
    assert done.code == 0, done.out + done.err
    return done


def test_it_learns_from_the_first_steps(first: Finished) -> None:
    rewards = [line["reward/mean"] for line in first.metrics]
    assert sum(rewards[:3]) / 3 < 0.5
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1


def test_the_first_ratio_is_one(first: Finished) -> None:
    assert first.metrics[0]["mismatch/log_ratio"] < 1e-4


def test_one_line_of_metrics_for_each_step_with_the_documented_names(first: Finished) -> None:
    assert [line["step"] for line in first.metrics] == list(range(1, 13))
    wanted = {
        "reward/mean", "advantage/abs", "groups/no_signal", "actor/loss", "actor/pg_loss", "actor/kl_loss",
        "actor/entropy",
        "actor/clip_fraction", "actor/grad_norm", "actor/lr", "rollout/tokens", "rollout/response_length/mean",
        "rollout/finish/stop", "mismatch/log_ratio", "mismatch/kl", "time/step", "time/engine", "time/rollout",
        "time/weight_sync", "throughput/tokens_per_s",
    }  # fmt: skip
    assert wanted <= set(first.metrics[0])


def test_the_console_shows_the_reward_of_each_step_and_a_final_table(first: Finished) -> None:
    assert first.out.count("reward ") >= 12
    assert "first 5 steps" in first.out
    assert "mean reward" in first.out
    assert "\x1b" not in first.out


def test_events_say_who_wrote_what_from_what_under_which_weights(first: Finished) -> None:
    by_node = {event["node"]: event for event in first.events if event["step"] == 2}
    assert set(by_node) == {
        "rollout", "reward", "old_logprob", "ref_logprob", "advantage", "actor_update", "weight_sync",
    }  # fmt: skip
    assert by_node["old_logprob"]["reads"] == ["prompt_ids", "response_ids", "temperature"]
    assert by_node["old_logprob"]["writes"] == ["old_log_probs"]
    assert by_node["old_logprob"]["version"] == 1
    assert by_node["old_logprob"]["worker"] == "train/0"
    assert len(by_node["old_logprob"]["rows"]) == 256
    rows = {row for event in first.events if event["node"] == "reward" and event["step"] == 2 for row in event["rows"]}
    assert rows == set(by_node["old_logprob"]["rows"])


def test_mlflow_holds_the_run(first: Finished) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{first.folder / 'runs' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("grpo-arithmetic")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [point.step for point in history] == list(range(1, 13))


def test_the_resolved_pipeline_in_the_run_folder_is_a_pipeline_again(
    first: Finished, flowrl: Callable[..., Finished]
) -> None:
    assert flowrl("check", first.run / "pipeline.yaml").code == 0


def test_one_seed_gives_one_run_and_another_seed_another(flowrl: Callable[..., Finished], tmp_path: Path) -> None:
    again = [finish(tmp_path / name, "run", DEFAULT, *STEPS) for name in ("one", "two")]
    other = finish(tmp_path / "other", "run", DEFAULT, *STEPS, "--set", "run.seed=1")
    values = [
        [
            {name: value for name, value in line.items() if not name.startswith(("time/", "throughput/", "idle/"))}
            for line in lines
        ]
        for lines in (run.metrics for run in (*again, other))
    ]
    assert values[0] == values[1]
    assert values[0] != values[2]


def test_ray_and_local_train_alike(flowrl: Callable[..., Finished], first: Finished) -> None:
    local = flowrl("run", DEFAULT, *STEPS, "--local")
    assert local.code == 0, local.err
    assert "nothing overlaps" in local.out
    for name in IDENTICAL:
        assert local.metrics[0][name] == pytest.approx(first.metrics[0][name], rel=2e-4, abs=1e-6), name


def test_two_training_workers_and_a_rollout_worker_of_their_own(
    flowrl: Callable[..., Finished], first: Finished
) -> None:
    pools = ("--set", "pools.train={workers: 2, cpus_per_worker: 0.5}",
             "--set", "pools.generate={shares: null, workers: 1, cpus_per_worker: 0.5}")  # fmt: skip
    split = flowrl("run", DEFAULT, *STEPS, *pools, "--set", "nodes.weight_sync.verify=true")
    assert split.code == 0, split.out + split.err
    workers = {event["worker"] for event in split.events if event["node"] == "actor_update"}
    assert workers == {"train/0", "train/1"}
    for name in IDENTICAL:
        assert split.metrics[0][name] == pytest.approx(first.metrics[0][name], rel=2e-4, abs=1e-6), name
    assert split.metrics[2]["reward/mean"] == pytest.approx(first.metrics[2]["reward/mean"], abs=0.05)


def test_the_ratio_is_one_at_another_temperature_too(flowrl: Callable[..., Finished]) -> None:
    run = flowrl(
        "run", DEFAULT, "--steps", "1", "--set", "tracking=null", "--set", "nodes.rollout.temperature=0.7", "--local"
    )
    assert run.code == 0, run.err
    assert run.metrics[0]["mismatch/log_ratio"] < 1e-4
