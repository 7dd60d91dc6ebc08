"""Bad rows, dead workers, interruptions: nothing hangs, nothing is lost, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import DEFAULT, FAKE, Finished, environment, gone, processes

REWARDS = '''
import os, time
from typing import NamedTuple
from flowrl import Node, Prompt, Sample


class Moody(Node):
    """Goes wrong on one row in the way it is told."""

    mood: str = "raise"

    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, response: Sample[str], answer: Prompt[str]) -> Out:
        if response.rows.names()[0].endswith("_2_0") and response.rows.uids[0] == min(self.first):
            if self.mood == "raise":
                raise ValueError("no verdict")
            if self.mood == "hang":
                while True:
                    pass
            if self.mood == "die":
                os._exit(3)
        return self.Out(Sample(response.rows, [1.0 if response.rows.session[0] else 0.0]))

    @property
    def first(self) -> list[str]:
        return ["u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7"]
'''


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    path = tmp_path / "fake.yaml"
    path.write_text(FAKE)
    return path


@pytest.mark.parametrize("mood", ["raise", "hang", "die"])
def test_a_bad_row_is_unscored_counted_and_named(mood: str, fake: Path, flowrl: Callable[..., Finished]) -> None:
    (fake.parent / "moody.py").write_text(REWARDS)
    reward = f"nodes.reward={{use: ./moody.py:Moody, mood: {mood}, timeout: 1.5}}"
    run = flowrl("run", fake, "--steps", "1", "--set", reward, "--set", "batch.prompts=64")
    assert run.code == 0, run.out + run.err
    (line,) = run.metrics
    assert line["reward/unscored"] == 1
    assert line["reward/mean"] == pytest.approx((64 * 3 - 1) / (64 * 4 - 1))
    log = (run.run / "log.txt").read_text()
    assert "u0_2_0" in log
    assert "reward" in log
    assert gone(fake.parent)


def test_a_node_that_raises_ends_the_run_with_its_error(fake: Path, flowrl: Callable[..., Finished]) -> None:
    code = (
        "from typing import NamedTuple\nfrom flowrl import Node, Sample, Token\n\n\nclass Broken(Node):\n"
        "    scope = 'group'\n\n    class Out(NamedTuple):\n        advantages: Token[float]\n\n"
        "    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:\n        raise KeyError('lost')\n"
    )
    (fake.parent / "broken.py").write_text(code)
    run = flowrl("run", fake, "--set", "nodes.advantage={use: ./broken.py:Broken}")
    assert run.code == 1
    assert "KeyError: 'lost' (node advantage; worker cpu/0; rows u" in run.err
    assert "broken.py" in (run.run / "log.txt").read_text()


def test_a_failed_session_is_dropped_and_its_siblings_are_trained(fake: Path, flowrl: Callable[..., Finished]) -> None:
    run = flowrl("run", fake, "--steps", "1", "--set", "nodes.rollout.script.texts=['1', null, '2', '3']")
    assert run.code == 0, run.err
    assert run.metrics[0]["rows/failed"] == 8
    assert "_1_0" in (run.run / "log.txt").read_text()


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flowrl", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=pipe, text=True, env=environment(folder))


def wait_for_step(run: subprocess.Popen[str], wanted: str) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        if wanted in line:
            return
    raise AssertionError(f"no line with {wanted!r} before the end")


def test_ctrl_c_ends_within_ten_seconds_and_leaves_nothing(tmp_path: Path) -> None:
    run = started(tmp_path, "run", str(DEFAULT), "--set", "tracking=null")
    wait_for_step(run, "step   3/")
    os.kill(run.pid, signal.SIGINT)
    start = time.monotonic()
    out, err = run.communicate(timeout=30)
    assert time.monotonic() - start < 10
    assert run.returncode == 130
    assert "interrupted" in out + err
    assert "Traceback" not in out + err
    assert gone(tmp_path)


@pytest.mark.parametrize("wanted", ["loading models", "step   2/"])
def test_a_sigterm_ends_like_a_ctrl_c(wanted: str, tmp_path: Path) -> None:
    run = started(tmp_path, "run", str(DEFAULT), "--set", "tracking=null")
    wait_for_step(run, wanted)
    os.kill(run.pid, signal.SIGTERM)
    out, err = run.communicate(timeout=20)
    assert run.returncode == 130, out + err
    assert "interrupted" in err
    assert gone(tmp_path)


@pytest.mark.parametrize("local", [False, True])
def test_an_impatient_ctrl_c_ends_as_cleanly(local: bool, tmp_path: Path) -> None:
    run = started(tmp_path, "run", str(DEFAULT), "--set", "tracking=null", *["--local"] * local)
    wait_for_step(run, "step   2/")
    for _ in range(3):
        os.kill(run.pid, signal.SIGINT)
        time.sleep(0.1)
    out, err = run.communicate(timeout=20)
    assert run.returncode == 130, out + err
    assert "Traceback" not in out + err
    assert gone(tmp_path)


def test_a_reward_that_fails_on_every_row_ends_the_run(fake: Path, flowrl: Callable[..., Finished]) -> None:
    code = REWARDS.replace('.endswith("_2_0") and', '.endswith("_0") or')
    (fake.parent / "moody.py").write_text(code)
    run = flowrl("run", fake, "--set", "nodes.reward={use: ./moody.py:Moody, mood: raise}")
    assert run.code == 1
    assert "every row of step 1 failed, the first with ValueError: no verdict (node reward; worker cpu/0" in run.err


def test_a_killed_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    run = started(tmp_path, "run", str(DEFAULT), "--set", "tracking=null")
    wait_for_step(run, "step   2/")
    workers = processes(tmp_path, "ray::RayWorker")
    assert workers
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "the worker died" in err
    assert "worker " in err
    assert gone(tmp_path)


def test_a_normal_run_ends_cleanly_every_time(fake: Path, flowrl: Callable[..., Finished]) -> None:
    for _ in range(5):
        run = flowrl("run", fake)
        assert run.code == 0, run.out + run.err
        assert "rror" not in run.out.replace("0 errors", "") + run.err
        assert gone(fake.parent)
