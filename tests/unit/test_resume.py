"""Which run goes on, from where, and that it then does what one that was never interrupted does."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import PrivateAttr
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import flowrl
from flowrl import Node, Sample
from flowrl.errors import PipelineError, RunError
from flowrl.run_files import locked, read_info

STEPS = 10


class Remember(Node):
    """Keeps the groups that it has seen; fails once in each of the steps that stand in a file."""

    scope = "batch"
    pure = False

    stops: str = ""
    _uids: list[list[str]] = PrivateAttr([])

    def state(self) -> dict[str, Any]:
        return {"uids": self._uids, 3: ("whatever", {"nested": None})}

    def load_state(self, state: dict[str, Any]) -> None:
        assert state[3] == ("whatever", {"nested": None})
        self._uids = state["uids"]

    def run(self, reward: Sample[float]) -> None:
        self._uids = [*self._uids, list(reward.rows.uids)]
        waiting = Path(self.stops).read_text().split() if self.stops else []
        if waiting and len(self._uids) == int(waiting[0]):
            Path(self.stops).write_text(" ".join(waiting[1:]))
            raise OSError("pulled the plug")


def document(tmp_path: Path, **more: Any) -> dict[str, Any]:
    stops = tmp_path / "stops"
    tmp_path.mkdir(exist_ok=True)
    stops.touch()
    found: dict[str, Any] = {
        "flowrl": 1,
        "name": "resume",
        "models": {"policy": {"path": "arith-tiny"}},
        "data": {"train": {"type": "arithmetic", "size": 24}},
        "batch": {"prompts": 8, "group": 2},
        "pools": {"generate": {"workers": 1}},
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 4,
            },
            "reward": {"use": "reward.exact_match"},
            "remember": {"use": f"{__file__}:Remember", "stops": str(stops)},
        },
        "run": {"steps": STEPS, "dir": str(tmp_path / "runs")},
        "checkpoint": {"every": 1},
    }  # fmt: skip
    return found | more


def attempt(document: dict[str, Any], resume: str | None = None) -> Path | None:
    """The run folder; None where the plug was pulled."""
    try:
        return flowrl.Pipeline(document).run(local=True, quiet=True, resume=resume).folder
    except RunError as error:
        if "pulled the plug" not in str(error):
            raise
        return None


def interrupted(tmp_path: Path, *stops: int, **more: Any) -> Path:
    """The folder of a run whose plug was pulled in these steps and that has gone on each time."""
    data = document(tmp_path, **more)
    (tmp_path / "stops").write_text(" ".join(map(str, stops)))
    for _ in stops:
        assert attempt(data) is None
    folder = attempt(data)
    assert folder is not None
    return folder


def folders(tmp_path: Path) -> list[Path]:
    return sorted(path.parent for path in (tmp_path / "runs").glob("*/run.json"))


def uids(folder: Path, step: int = STEPS) -> list[list[str]]:
    with (folder / "checkpoints" / f"step_{step}" / "nodes" / "remember" / "0.pickle").open("rb") as file:
        found: list[list[str]] = pickle.load(file)["uids"]
    return found


def steps_of(folder: Path, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (folder / name).read_text().splitlines()]


def log(folder: Path) -> str:
    return (folder / "log.txt").read_text()


def endless() -> Iterator[dict[str, str]]:
    """Rows without end."""
    for number in itertools.count():
        yield {"prompt": f"{number}", "answer": str(number)}


ROWS = [{"prompt": f"{number}", "answer": str(number)} for number in range(21)]
MIXED = {
    "type": "mixture",
    "sources": {"hard": {"type": "arithmetic", "size": 30}, "easy": {"type": "arithmetic", "size": 16, "seed": 5}},
    "weights": {"easy": 2.0},
}


@pytest.mark.parametrize("train", ["shuffled", "in order", "mixture", "stream", "uneven"])
@pytest.mark.parametrize("every", [1, 2])
def test_the_same_groups_in_the_same_order_as_one_that_was_not_interrupted(
    train: str, every: int, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    data: dict[str, Any] = {
        "shuffled": {"type": "arithmetic", "size": 24},
        "in order": {"type": "arithmetic", "size": 24, "shuffle": False},
        "mixture": MIXED,
        "stream": {"type": "python", "call": f"{__file__}:endless", "streaming": True, "buffer": 20},
        "uneven": {"type": "jsonl", "path": str(file)},
    }[train]
    more = {"data": {"train": data}, "checkpoint": {"every": every}}
    plain = interrupted(tmp_path / "plain", **more)
    # The third step ends the first epoch of 24 rows; three stops lie within the second one.
    broken = interrupted(tmp_path / "broken", 4, 5, 6, 7, 10, **more)
    assert uids(broken) == uids(plain)
    assert steps_of(broken) == list(range(1, STEPS + 1))
    assert set(steps_of(broken, "events.jsonl")) == set(range(1, STEPS + 1))
    assert len(folders(tmp_path / "broken")) == 1
    info = read_info(broken)
    assert info is not None
    assert [one.status for one in info.attempts] == ["failed"] * 5 + ["finished"]
    assert info.attempts[1].after_step == 3 - 3 % every


def test_the_result_of_a_run_that_went_on_has_the_metrics_of_all_steps(tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("4")
    attempt(data)
    result = flowrl.Pipeline(data).run(local=True, quiet=True)
    assert len(result.metrics) == STEPS
    assert "step" not in result.metrics[0]


def test_what_was_measured_before_training_stands_once_in_the_records_and_in_the_result(tmp_path: Path) -> None:
    data = document(tmp_path, checkpoint={"every": 3})
    data["data"]["val"] = {"type": "arithmetic", "size": 4}
    data["nodes"]["accuracy"] = {"use": "evaluate.accuracy", "samples": 2, "before_training": True}
    (tmp_path / "stops").write_text("2 5")
    assert attempt(data) is None  # and begins again
    assert attempt(data) is None
    result = flowrl.Pipeline(data).run(local=True, quiet=True)
    assert steps_of(result.folder) == list(range(STEPS + 1))
    assert (len(result.metrics), len(result.before_training) > 0) == (STEPS, True)


def test_a_finished_run_is_not_gone_on_with_by_itself(tmp_path: Path) -> None:
    data = document(tmp_path)
    first, second = attempt(data), attempt(data)
    assert first != second
    assert second is not None and "starts anew" not in log(second)


@pytest.mark.parametrize("how", ["document", "option"])
def test_never_starts_anew_and_settles_that_the_older_run_is_abandoned(how: str, tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    if how == "document":
        attempt(data | {"checkpoint": {"every": 1, "resume": "never"}})
    else:
        attempt(data, resume="never")
    attempt(data | {"checkpoint": {"every": 1, "resume": "never"}}, resume="auto")
    assert len(folders(tmp_path)) == 3


def test_a_run_that_had_saved_nothing_begins_again_in_its_folder(tmp_path: Path) -> None:
    data = document(tmp_path, checkpoint={"every": 5})
    (tmp_path / "stops").write_text("3")
    assert attempt(data) is None
    (left,) = folders(tmp_path)
    assert attempt(data) == left
    assert f"begins again in {left.name}, which did not finish and had saved nothing" in log(left)
    assert steps_of(left) == list(range(1, STEPS + 1))
    assert uids(left) == uids(interrupted(tmp_path / "plain"))


def test_what_was_measured_before_training_is_recorded_once_whatever_happens(tmp_path: Path) -> None:
    """Stopped before the first checkpoint it comes again; after it, it is kept, and is no step of the result."""
    data = document(tmp_path, checkpoint={"every": 4}, tracking={"type": "tensorboard"})
    data["data"]["val"] = {"type": "arithmetic", "size": 3, "seed": 1}
    data["nodes"]["accuracy"] = {"use": "evaluate.accuracy", "every": 3, "before_training": True}
    (tmp_path / "stops").write_text("2 7")
    assert attempt(data) is None and attempt(data) is None
    result = flowrl.Pipeline(data).run(local=True, quiet=True)
    assert steps_of(result.folder) == list(range(STEPS + 1))
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val/arithmetic/mean@1" in line] == [0, 3, 6, 9]
    assert len(result.metrics) == STEPS and result.before_training["val/arithmetic/rows"] == 3
    events = EventAccumulator(str(result.folder / "tensorboard")).Reload()
    for name in ("val/arithmetic/mean@1", "rollout/tokens"):
        values = {line["step"]: line[name] for line in lines if name in line}
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(s, pytest.approx(v)) for s, v in values.items()]


def test_a_run_whose_checkpoints_are_all_damaged_is_left_as_it_is(tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("3")
    assert attempt(data) is None
    (left,) = folders(tmp_path)
    for path in (left / "checkpoints").glob("*/random/cpu-0.pickle"):
        path.unlink()
    folder = attempt(data)
    assert folder is not None and folder != left
    assert f"starts anew: {left.name} did not finish and has no complete checkpoint" in log(folder)
    assert steps_of(left) == [1, 2, 3][: len(steps_of(left))]


def test_other_settings_start_anew_and_are_named(tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    (left,) = folders(tmp_path)
    folder = attempt(data | {"batch": {"prompts": 4, "group": 2}})
    assert folder is not None and folder != left
    assert f"starts anew: {left.name} did not finish (checkpoint of step 3), but has other settings: " in log(folder)
    assert "batch.prompts 8 -> 4" in log(folder)
    assert f"--resume {left.name}" in log(folder)


def test_more_steps_other_trackers_and_another_interval_are_the_same_run(tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    run = data["run"] | {"steps": 6}
    folder = attempt(data | {"run": run, "checkpoint": {"every": 3, "keep": 1}, "tracking": [{"type": "none"}]})
    assert folder is not None
    assert steps_of(folder) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step_6"]
    assert f"goes on from step 3 of {folder.name}" in log(folder)


def test_fewer_steps_than_are_done_start_anew(tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    folder = attempt(data | {"run": data["run"] | {"steps": 2}})
    assert folder is not None
    assert "it is at step 3 of 2" in log(folder)


def test_a_run_that_is_still_running_is_left_alone(tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    (left,) = folders(tmp_path)
    with locked(left):
        folder = attempt(data)
        assert folder is not None and folder != left
        assert "is still running" in log(folder)
        with pytest.raises(PipelineError, match=r"FR080.*is still running"):
            attempt(data, resume=left.name)


def test_a_named_run_goes_on_with_other_settings(tmp_path: Path) -> None:
    data = document(tmp_path)
    first = attempt(data)
    assert first is not None
    more = data | {"run": data["run"] | {"steps": 12, "seed": 1}}
    second = attempt(more, resume=first.name)
    assert second == first
    assert steps_of(first) == list(range(1, 13))
    assert "with other settings: run.seed 0 -> 1" in log(first)
    assert "run.seed has changed since the checkpoint" in log(first)
    assert "seed: 1" in (first / "pipeline.yaml").read_text()


def test_an_earlier_checkpoint_is_gone_on_from_where_it_is_named(tmp_path: Path) -> None:
    data = document(tmp_path, checkpoint={"every": 2, "keep": 9})
    first = attempt(data)
    assert first is not None
    before = uids(first)
    (tmp_path / "stops").write_text("6")
    assert attempt(data, resume=str(first / "checkpoints" / "step_4")) is None
    assert steps_of(first) == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["step_2", "step_4"]
    assert attempt(data) == first
    assert uids(first) == before


@pytest.mark.parametrize("how", ["document", "option"])
def test_what_cannot_be_gone_on_from_is_refused_before_anything_starts(how: str, tmp_path: Path) -> None:
    data = document(tmp_path)
    first = attempt(data)
    assert first is not None

    def refused(name: str, **more: Any) -> str:
        changed = data | more
        if how == "document":
            changed = changed | {"checkpoint": {"every": 1, "resume": name}}
        with pytest.raises(PipelineError) as caught:
            attempt(changed, resume=name if how == "option" else None)
        (problem,) = caught.value.problems
        assert problem.code == "FR080"
        return problem.fact + problem.fix

    assert f"there is no run '{first.name}x'did you mean '{first.name}'?" in refused(f"{first.name}x")
    assert "there is no run '/nowhere'" in refused("/nowhere")
    assert "at step 10 of 10--steps 11 or more" in refused(first.name)
    assert "at step 10 of 3" in refused(first.name, run=data["run"] | {"steps": 3})
    more = {"run": data["run"] | {"steps": 20}}
    told = refused(f"{first}/checkpoints/step_7", **more)
    assert "checkpoints/step_7: there is no such folder" in told
    assert told.endswith("checkpoints/step_10, which is complete")
    trains = {
        "update": {"use": "update.policy", "model": "policy", "pool": "generate", "minibatch": 8},
        "advantage": {"use": "advantage.grpo"},
        "sync": {"use": "sync.weights", "model": "policy"},
    }
    models = {"policy": {"path": "arith-tiny", "trainable": True}}
    told = refused(first.name, nodes=data["nodes"] | trains, models=models, **more)
    assert "it holds no weights for nodes.update" in told
    for folder in (first / "checkpoints").iterdir():
        (folder / "checkpoint.json").unlink()
    assert "has no complete checkpoint: checkpoints/step_10 is left out" in refused(first.name, **more)
    assert len(folders(tmp_path)) == 1


def test_another_file_of_data_starts_at_its_beginning_with_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    data = document(tmp_path, data={"train": {"type": "jsonl", "path": str(file), "shuffle": False}})
    (tmp_path / "stops").write_text("3")
    assert attempt(data) is None
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[:9]))
    folder = attempt(data)
    assert folder is not None
    assert uids(folder)[2] == [f"u{row}" for row in range(8)]
    assert "warning: data.train: its rows have changed since the checkpoint" in log(folder)


def test_a_half_written_checkpoint_is_left_out_and_the_log_says_why(tmp_path: Path) -> None:
    data = document(tmp_path, checkpoint={"every": 1, "keep": 3})
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    (left,) = folders(tmp_path)
    (left / "checkpoints" / "step_3" / "random" / "cpu-0.pickle").write_bytes(b"")
    (left / "checkpoints" / ".step_4-abc.partial").mkdir()
    with (left / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    folder = attempt(data)
    assert folder == left
    assert "step_3 is left out: random/cpu-0.pickle has 0 of" in log(left)
    assert ".step_4-abc.partial is left out: its writing was broken off" in log(left)
    assert "goes on from step 2" in log(left)
    assert steps_of(left) == list(range(1, STEPS + 1))
    assert not (left / "checkpoints" / ".step_4-abc.partial").exists()


def test_one_that_is_damaged_and_yet_complete_ends_the_run_with_its_name(tmp_path: Path) -> None:
    data = document(tmp_path)
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    (left,) = folders(tmp_path)
    (left / "checkpoints" / "step_90").touch()  # whatever that is, it is no checkpoint
    file = left / "checkpoints" / "step_3" / "random" / "cpu-0.pickle"
    file.write_bytes(b"?" * file.stat().st_size)
    with pytest.raises(
        RunError, match=r"checkpoint of step 3 of .* cannot be loaded: .*remove .*/step_3, and the same"
    ):
        attempt(data)
    shutil.rmtree(file.parents[1])
    assert attempt(data) == left
    assert uids(left) == uids(interrupted(tmp_path / "plain"))


def test_without_checkpoints_nothing_is_saved_and_nothing_gone_on_with(tmp_path: Path) -> None:
    data = document(tmp_path)
    del data["checkpoint"]
    folder = attempt(data)
    assert folder is not None and not (folder / "checkpoints").exists()


def test_a_misspelt_word_is_found_by_the_check(tmp_path: Path) -> None:
    (problem,) = flowrl.Pipeline(document(tmp_path, checkpoint={"resume": "atuo"})).check()
    assert (problem.code, problem.fix) == ("FR080", "did you mean 'auto'?")


def test_mlflow_goes_on_with_its_run_and_marks_the_attempt(tmp_path: Path) -> None:
    from mlflow import MlflowClient

    data = document(tmp_path, tracking=[{"type": "mlflow"}])
    (tmp_path / "runs").mkdir()
    client = MlflowClient(f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}")
    experiment = client.create_experiment("resume")  # a fresh database takes longer than a run that fails waits for it
    (tmp_path / "stops").write_text("4")
    assert attempt(data) is None
    assert attempt(data) is not None
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    assert run.data.tags["flowrl.attempt"] == "2"
    history = client.get_metric_history(run.info.run_id, "rollout/tokens")
    assert {point.step for point in history} == set(range(1, STEPS + 1))
