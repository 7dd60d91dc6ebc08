"""The asynchronous schedules on real Ray: they learn, bound the age of samples, lose nothing, go on after a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import ROOT, Finished, environment, finish, gone

pytestmark = pytest.mark.timeout(600)
FLOWS = """
flowrl: 1
name: flows
models: {policy: {path: arith-tiny, trainable: true, optimizer: {lr: 1.0e-3}}}
data: {train: {type: arithmetic, size: 512}}
batch: {prompts: 8, group: 2}
pools: {train: {workers: 1, cpus_per_worker: 0.5}, generate: {workers: 1, cpus_per_worker: 0.5}}
schedule: {mode: separate_async, max_staleness: 1}
nodes:
  rollout:
    use: rollout.generate
    model: policy
    pool: generate
    engine: fake
    max_tokens: 4
    script: {vocabulary: 18, texts: ["1", "22"], seconds: [0.05, 0.1, 0.15]}
  reward: {use: reward.exact_match}
  advantage: {use: advantage.grpo}
  old_logprob: {use: model.logprob, model: policy, pool: train, writes: {log_probs: old_log_probs}}
  actor_update: {use: update.policy, model: policy, pool: train, minibatch: 8}
  weight_sync: {use: sync.weights, model: policy}
run: {steps: 8}
tracking: []
"""


def trained(done: Finished) -> dict[int, list[str]]:
    """The groups of each step's batches."""
    steps: dict[int, set[str]] = {}
    for event in done.events:
        if event["node"] == "old_logprob":
            steps.setdefault(event["step"], set()).update(row.split("_")[0] for row in event["rows"])
    return {step: sorted(uids) for step, uids in steps.items()}


def flows(folder: Path, *arguments: str, pipeline: str = "flows.yaml") -> Finished:
    folder.mkdir(exist_ok=True)
    (folder / "flows.yaml").write_text(FLOWS)
    return finish(folder, "run", pipeline, *arguments)


@pytest.mark.parametrize("mode", ["colocate_async", "separate_async"])
def test_the_shipped_pipelines_learn_within_their_bound_of_staleness(mode: str, tmp_path: Path) -> None:
    done = finish(tmp_path, "run", ROOT / f"pipelines/grpo_{mode}.yaml", "--steps", "40", "--set", "tracking=[]")
    assert done.code == 0, done.out + done.err
    assert [step["step"] for step in done.metrics] == [*range(1, 41)]
    late = done.metrics[-5:]
    assert sum(step["reward/mean"] for step in late) / 5 > 0.8
    assert 1 <= max(step["staleness/max"] for step in done.metrics) <= 2
    assert max(step["mismatch/log_ratio"] for step in done.metrics) < 0.5
    steps = trained(done)
    uids = [uid for groups in steps.values() for uid in groups]
    assert len(uids) == len(set(uids)) == 40 * 32
    assert gone(tmp_path)


SAME = """
extends: flows.yaml
pools: {train: {cpus_per_worker: 0.5, threads_per_worker: 1}}
nodes:
  rollout: {max_tokens: 3, script: {vocabulary: 18, texts: ["1", "23", "4"], shuffle: true, seconds: [0.01, 0.0, 0.02]}}
  reward: {use: "STUBS:Judge", writes: {score: reward}}
  informative: {use: filter.informative, gate: keep}
  witness: {use: "STUBS:Witness", file: hashes.txt}
run: {steps: 4}
"""


def test_without_slack_the_three_schedules_write_the_same_values(tmp_path: Path) -> None:
    found = {}
    shared, own = "{shares: train, cpus_per_worker: null}", "{cpus_per_worker: 0.5, threads_per_worker: 1}"
    for mode, generate in (("sync", shared), ("colocate_async", shared), ("separate_async", own)):
        folder = tmp_path / mode
        folder.mkdir()
        (folder / "same.yaml").write_text(SAME.replace("STUBS", str(ROOT / "tests" / "stub_nodes.py")))
        schedule = f"{{mode: {mode}}}" if mode == "sync" else f"{{mode: {mode}, max_staleness: 0}}"
        settings = ("--set", f"schedule={schedule}", "--set", f"pools.generate={generate}")
        done = flows(folder, *settings, pipeline="same.yaml")
        assert done.code == 0, done.out + done.err
        assert sum(step["rollout/given_up/filtered"] for step in done.metrics) > 0
        losses = [(step["actor/loss"], step["actor/grad_norm"]) for step in done.metrics]
        found[mode] = losses, sorted((folder / "hashes.txt").read_text().splitlines())
    assert len(found["sync"][1]) == 4 * 16 * 6
    assert found["colocate_async"] == found["separate_async"] == found["sync"]


def test_a_prompt_that_takes_three_steps_is_given_up_twice_and_then_waited_for(tmp_path: Path) -> None:
    slow = "nodes.rollout.script={vocabulary: 18, texts: ['1', '22'], seconds: [0.05, 0.05, 0.05, 0.05, 0.05, 2.5]}"
    done = flows(tmp_path, "--set", slow, "--steps", "12")
    assert done.code == 0, done.out + done.err
    assert max(step["staleness/max"] for step in done.metrics) <= 1
    assert max(step["rollout/in_flight"] for step in done.metrics) <= 16
    given_up = sum(step["rollout/given_up/stale"] for step in done.metrics)
    assert given_up > 0
    uids = [uid for groups in trained(done).values() for uid in groups]
    assert len(uids) == len(set(uids)) == 12 * 8
    assert any(uid.endswith("a2") for uid in uids), "a third attempt is trained"
    assert sum(step.get("rollout/given_up/stale/unfinished", 0) for step in done.metrics) > 0


def test_a_group_that_never_ends_is_named_and_tried_again(tmp_path: Path) -> None:
    stalls = "nodes.rollout.script={vocabulary: 18, texts: ['1', '22'], stall: 0.1}"
    waits = ("--set", "schedule.stale=wait", "--set", "nodes.rollout.timeout=1.5")
    done = flows(tmp_path, "--set", stalls, *waits, "--steps", "6")
    assert done.code == 0, done.out + done.err
    assert sum(step["rollout/given_up/late"] for step in done.metrics) > 0
    log = (done.run / "log.txt").read_text()
    assert "rollout had no end within its timeout of 1.5 s on generate/0: u" in log
    uids = [uid for groups in trained(done).values() for uid in groups]
    assert len(uids) == len(set(uids)) == 6 * 8
    assert any(uid.endswith("a1") for uid in uids)


def test_a_killed_run_goes_on_with_what_was_in_flight(tmp_path: Path) -> None:
    whole = flows(tmp_path / "whole", "--set", "checkpoint={every: 1}", "--steps", "12")
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "flows.yaml").write_text(FLOWS)
    arguments = ["run", "flows.yaml", "--set", "checkpoint={every: 1}", "--steps", "12"]
    with (folder / "out.txt").open("w") as out:
        run = subprocess.Popen(
            [sys.executable, "-m", "flowrl", *arguments], cwd=folder, env=environment(folder), stdout=out, stderr=out
        )
        deadline = time.monotonic() + 120
        while "step  4/12" not in (folder / "out.txt").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
    assert gone(folder, seconds=20)
    done = finish(folder, *arguments)
    assert done.code == 0, done.out + done.err
    assert "goes on from step" in (done.run / "log.txt").read_text()
    assert [step["step"] for step in done.metrics] == [*range(1, 13)]
    assert max(step["staleness/max"] for step in done.metrics) <= 1
    expected, found = (sorted(uid for groups in trained(each).values() for uid in groups) for each in (whole, done))
    assert len(found) == len(set(found)) == 12 * 8
    assert len(set(expected) - set(found)) <= 8, "the last prompts in flight may be others"
