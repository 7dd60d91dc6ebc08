"""Runs that are killed go on as if nothing had happened; a disk that is full costs no checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Finished, environment, finish, gone
from typer.testing import CliRunner

from flowrl.cli import app

pytestmark = pytest.mark.timeout(600)
TRAINS = """
flowrl: 1
name: trains
models: {policy: {path: arith-tiny, trainable: true, optimizer: {lr: 1.0e-3}}}
data: {train: {type: arithmetic, size: 20}}
batch: {prompts: 8, group: 4}
pools: {train: {workers: 1}, generate: {shares: train}}
nodes:
  rollout:
    use: rollout.generate
    model: policy
    pool: generate
    engine: fake
    max_tokens: 8
    script: {vocabulary: 18, texts: ["0", "1", "22", "3"]}
  reward: {use: ./odd.py:Odd}
  advantage: {use: advantage.grpo}
  actor_update: {use: update.policy, model: policy, pool: train, minibatch: 8}
  weight_sync: {use: sync.weights, model: policy}
run: {steps: 8}
checkpoint: {every: 2}
"""
ODD = '''
from typing import NamedTuple
from flowrl import Node, Prompt, Sample, Token, metric


class Odd(Node):
    """Rewards that differ inside every group."""

    scope = "batch"

    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, response: Sample[str], policy_version: Token[int]) -> Out:
        rows = response.rows
        metric("version", float(policy_version.values.min()), reduce="last")
        return self.Out(Sample(rows, [float((s + len(n)) % 3 == 0) for s, n in zip(rows.session, rows.names())]))
'''
DIES = """
import importlib, os, signal, sys
import flowrl

module, name, number = importlib.import_module(sys.argv[1]), sys.argv[2], int(sys.argv[3])
original, num_calls = getattr(module, name), 0


def counted(*arguments, **more):
    global num_calls
    num_calls += 1
    if num_calls == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **more)


setattr(module, name, counted)
flowrl.load("trains.yaml").run(local=True, quiet=True)
"""


def prepared(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "odd.py").write_text(ODD)
    (folder / "trains.yaml").write_text(TRAINS)
    return folder


def ids(run: Path) -> dict[int, list[str]]:
    """The rows that each step has trained on, in the order of the records."""
    found: dict[int, list[str]] = {}
    for line in (run / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["node"] == "actor_update":
            found[event["step"]] = event["rows"]
        if event["node"] == "reward":
            found.setdefault(-event["step"], []).extend(event["rows"])
    return found


def state(run: Path, step: int) -> Any:
    from flowrl.engine.sharded import read

    return read(run / "checkpoints" / f"step_{step}" / "nodes" / "actor_update", {})


def assert_same(one: Path, two: Path, step: int) -> None:
    import torch

    assert ids(one) == ids(two)
    first, second = state(one, step), state(two, step)
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    for name, gathered in first["optimizer"]["state"].items():
        for key, value in gathered.items():
            assert torch.equal(value, second["optimizer"]["state"][name][key]), (name, key)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    done = finish(prepared(tmp_path_factory.mktemp("plain")), "run", "trains.yaml", "--local")
    assert done.code == 0, done.err
    return done


def killed_at(folder: Path, step: int, *arguments: str) -> None:
    """Kill a run at some moment of a step, or soon after its start where it never comes to that."""
    command = [sys.executable, "-u", "-m", "flowrl", "run", "trains.yaml", *arguments]
    run = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment(folder))
    assert run.stdout is not None
    for line in run.stdout:
        if re.match(rf"step +{step}/", line):
            time.sleep(0.05 * step)
            break
    run.kill()
    run.wait()
    run.stdout.close()


def test_a_run_that_is_killed_again_and_again_ends_as_if_it_had_not_been(plain: Finished, tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    slow = TRAINS.replace("{vocabulary: 18", "{seconds: [0.6], vocabulary: 18")
    assert slow != TRAINS
    (folder / "trains.yaml").write_text(slow)  # so that a step is longer than the way of a line to the test
    for step in (3, 4, 6):
        killed_at(folder, step)
        assert gone(folder, 15)
    done = finish(folder, "run", "trains.yaml")
    assert done.code == 0, done.err
    assert re.search(r"goes on from step [2468] of trains-", done.out)
    assert [line["step"] for line in done.metrics] == list(range(1, 9))
    assert [line["version"] for line in done.metrics] == list(range(8)), "the engine has the trained weights"
    assert_same(plain.run, done.run, 8)


PHASES = [
    ("flowrl.engine.states", "_write_pickle", 3),
    ("flowrl.engine.sharded", "save", 2),
    ("flowrl.engine.checkpoint", "put_in_place", 2),
    ("flowrl.engine.checkpoint", "mark", 2),
]


@pytest.mark.parametrize(("module", "name", "number"), PHASES)
def test_killed_in_any_phase_of_a_save_it_goes_on_from_the_one_before(
    module: str, name: str, number: int, plain: Finished, tmp_path: Path
) -> None:
    folder = prepared(tmp_path)
    command = [sys.executable, "-c", DIES, module, name, str(number)]
    died = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment(folder))
    assert died.returncode == -9, died.stderr
    done = finish(folder, "run", "trains.yaml", "--local")
    assert done.code == 0, done.err
    assert re.search(r"is left out: .*writing was broken off", done.out)
    assert "goes on from step 2 of" in done.out
    assert_same(plain.run, done.run, 8)
    assert sorted(path.name for path in (done.run / "checkpoints").iterdir()) == ["step_6", "step_8"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """12 MB: room for one checkpoint of 8."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a disk")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_ends_the_run_with_its_name_and_leaves_the_older_checkpoint(
    small_disk: Path, plain: Finished, tmp_path: Path
) -> None:
    folder = prepared(tmp_path)
    where = ("--set", f"run.dir={small_disk}")
    done = finish(folder, "run", "trains.yaml", "--local", *where)
    assert done.code == 1
    assert re.search(
        rf"the checkpoint of step 4 could not be written to {small_disk}/trains-[\d-]+/checkpoints: .*"
        r"It takes 7\.6 MiB, and [34]\.\d MiB are free\. The checkpoint of step 2 is complete",
        done.err,
    ), done.err
    assert "Traceback" not in done.err
    (run,) = small_disk.glob("trains-*")
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_2"]
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    assert finish(folder, "run", "trains.yaml", "--local", *where).code == 0
    assert_same(plain.run, run, 8)


def test_the_exported_model_is_the_trained_one(plain: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def export(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["export", *arguments], catch_exceptions=False)
        return done.exit_code, done.stderr

    monkeypatch.chdir(plain.folder)
    assert export(plain.run.name, "-o", "model")[0] == 0
    model = AutoModelForCausalLM.from_pretrained(plain.folder / "model")
    weights = state(plain.run, 8)["weights"]
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(plain.folder / "model")("1+1=").input_ids
    assert export(plain.run.name, "--step", "6", "-o", "older")[0] == 0
    for wrong, told in [
        (("nothing",), "there is no run 'nothing'"),
        ((plain.run.name, "--step", "3"), "has no checkpoint of step 3: there is no such folder; steps there: 6, 8"),
        ((plain.run.name, "-o", "model"), "exists and is not empty"),
        ((plain.run.name, "--adapter", "-o", "x"), "was trained as a whole and has no adapter"),
        ((plain.run.name, "--model", "polcy", "-o", "x"), "did you mean 'policy'?"),
    ]:
        code, said = export(*wrong)
        assert (code, said.count("\n") <= 2) == (2, True), said
        assert told in said


def test_two_workers_save_what_one_goes_on_with(tmp_path: Path) -> None:
    folder = prepared(tmp_path)
    two = ("--set", "pools.train={workers: 2, cpus_per_worker: 0.5}")
    first = finish(folder, "run", "trains.yaml", "--steps", "2", *two)
    assert first.code == 0, first.err
    assert (first.run / "checkpoints" / "step_2" / "random" / "train-1.pickle").is_file()
    again = finish(folder, "run", "trains.yaml", "--steps", "3", "--resume", first.run.name)
    assert again.code == 0, again.err
    assert "with other settings: pools.train.workers 2 -> 1" in again.out
    assert [line["version"] for line in again.metrics] == [0, 1, 2]
