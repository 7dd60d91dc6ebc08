"""Runs with vLLM: the same answers twice, the same learning, replicas, a split model, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import DEFAULT, Finished, environment, finish, gone, processes

from flowrl.engine.sweeper import shared_memory

DUMP = '''
import json
from typing import NamedTuple
from flowrl import Node, Sample, Token


class Dump(Node):
    """Write down every response by the name of its row."""

    scope = "step"
    path: str

    class Out(NamedTuple):
        seen: Sample[int]

    def run(self, response_ids: Token[int]) -> Out:
        ids = [part.tolist() for part in response_ids.jagged]
        with open(self.path, "a") as file:
            file.write(json.dumps(dict(zip(response_ids.rows.names(), ids, strict=True))) + "\\n")
        return self.Out(Sample(response_ids.rows, response_ids.lengths))
'''
VLLM = ("--set", "nodes.rollout.engine=vllm", "--set", "tracking=null")
TWO_WORKERS = ("--set", "pools.generate={shares: null, workers: 2, cpus_per_worker: 0.25}")


def run_dumped(folder: Path, *arguments: str) -> tuple[Finished, list[dict[str, list[int]]]]:
    """A run with vLLM, and the responses of each step."""
    folder.mkdir()
    (folder / "dump.py").write_text(DUMP)
    node = f"nodes.dump={{use: {folder}/dump.py:Dump, path: {folder}/ids.jsonl}}"
    done = finish(folder, "run", DEFAULT, *VLLM, "--set", node, *arguments, timeout=280)
    assert done.code == 0, done.out + done.err
    return done, [json.loads(line) for line in (folder / "ids.jsonl").read_text().splitlines()]


def test_a_run_samples_the_same_twice_and_something_else_with_another_seed(tmp_path: Path) -> None:
    steps = ("--steps", "5", "--set", "nodes.weight_sync.verify=true")
    first, ids = run_dumped(tmp_path / "first", *steps)
    again, same = run_dumped(tmp_path / "again", *steps)
    _, others = run_dumped(tmp_path / "other", "--steps", "1", "--set", "run.seed=1")
    assert len(ids) == 5 and all(len(step) == 256 for step in ids)
    assert same == ids
    kept = ("reward/mean", "actor/loss", "actor/grad_norm", "mismatch/log_ratio")
    assert [[line[name] for name in kept] for line in again.metrics] == [
        [line[name] for name in kept] for line in first.metrics
    ]
    assert sorted(others[0].values()) != sorted(ids[0].values())
    assert max(line["mismatch/log_ratio"] for line in first.metrics) < 1e-4
    assert first.metrics[-1]["reward/mean"] > first.metrics[0]["reward/mean"]
    assert all(gone(tmp_path / name) for name in ("first", "again", "other"))


def test_two_replicas_share_the_prompts_and_not_their_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "7+8=", "answer": "15"}\n' * 8)
    data = f"data.train={{type: jsonl, path: {tmp_path}/data.jsonl, shuffle: false}}"
    sizes = ("--steps", "2", "--set", "batch={prompts: 8, group: 8}", "--set", "nodes.actor_update.minibatch=8")
    done, ids = run_dumped(tmp_path / "run", *TWO_WORKERS, *sizes, "--set", data)
    shares = {event["worker"]: set(event["rows"]) for event in done.events if event["node"] == "rollout"}
    assert set(shares) == {"generate/0", "generate/1"}
    rows = [event for event in done.events if event["node"] == "rollout" and event["step"] == 1]
    counts = {name: sum(len(e["rows"]) for e in rows if e["worker"] == name) for name in shares}
    assert set(counts.values()) == {32}  # half of the prompts for each
    by_worker = [[ids[0][row] for e in rows if e["worker"] == name for row in sorted(e["rows"])] for name in shares]
    assert by_worker[0] != by_worker[1]  # the same prompt everywhere, drawn anew by each
    assert gone(tmp_path / "run")


def test_a_model_split_over_two_workers_generates_and_takes_new_weights(tmp_path: Path) -> None:
    split = ("--set", "nodes.rollout.tensor_parallel=2", "--set", "nodes.weight_sync.verify=true")
    done, _ = run_dumped(tmp_path / "run", *TWO_WORKERS, *split, "--steps", "3")
    assert {event["worker"] for event in done.events if event["node"] == "rollout"} == {"generate/0"}
    assert max(line["mismatch/log_ratio"] for line in done.metrics) < 1e-4
    assert gone(tmp_path / "run")


def test_it_learns_what_it_learns_with_the_transformers_engine(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    mine, _ = run_dumped(tmp_path / "mine", "--steps", "40")
    other = finish(tmp_path / "other", "run", DEFAULT, "--set", "tracking=null", "--steps", "40")
    means = [sum(line["reward/mean"] for line in run.metrics[-10:]) / 10 for run in (mine, other)]
    assert abs(means[0] - means[1]) < 0.1
    assert min(means) > mine.metrics[0]["reward/mean"] + 0.3


def shared(folder: Path) -> set[Path]:
    """What the processes of a run have shared."""
    return set().union(*map(shared_memory, processes(folder)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("loaded", [False, True])
def test_nothing_of_vllm_outlives_a_run_that_is_ended(loaded: bool, number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flowrl", "run", str(DEFAULT), *VLLM]
    run = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(tmp_path)
    )
    assert run.stdout is not None
    until = "step   2/" if loaded else "loading models"
    assert any(until in line for line in run.stdout)
    while not (loaded or shared(tmp_path)):
        assert run.poll() is None
        time.sleep(0.05)  # whoever reads the maps of a process all the time keeps it from loading
    time.sleep(0 if loaded else 2.0)  # what a run has shared is looked at twice a second
    named = shared(tmp_path)
    assert processes(tmp_path, "EngineCore") or len(processes(tmp_path)) > 3
    os.kill(run.pid, number)
    run.wait(timeout=60)
    run.stdout.close()
    assert gone(tmp_path, seconds=20)
    assert not [path for path in named if path.exists()]
