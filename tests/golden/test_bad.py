"""Every kind of mistake: one file, and beside it exactly what a user sees."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "bad"
FILES = sorted(FOLDER.glob("*.yaml"))


def command(*arguments: str) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.monotonic()
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    run = [sys.executable, "-m", "flowrl", *arguments]
    done = subprocess.run(run, cwd=FOLDER, capture_output=True, text=True, timeout=60, env=environment)
    return done, time.monotonic() - start


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_wrong_file_is_refused_by_run_with_place_fact_and_fix(file: Path, request: pytest.FixtureRequest) -> None:
    done, seconds = command("run", file.name)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    expected = file.with_suffix(".txt")
    if request.config.getoption("--update-golden"):
        expected.write_text(done.stderr)
    assert done.stderr == expected.read_text()
    assert "Traceback" not in done.stderr
    assert seconds < 10, "under two seconds on an idle machine; much more means that Ray or torch was started"


def test_five_mistakes_in_one_file_are_five_errors_in_one_go() -> None:
    done, _ = command("check", "five_at_once.yaml")
    assert done.returncode == 2
    assert done.stderr.count("error[") == 5


def test_a_missing_file() -> None:
    done, _ = command("run", "nowhere.yaml")
    assert done.returncode == 2
    assert done.stderr.startswith("error[FR001] nowhere.yaml:1:1  ")


def test_more_workers_than_cores_are_refused_with_what_was_asked_and_what_is_there() -> None:
    done, _ = command("run", "../../../pipelines/grpo_sync.yaml", "--set", "pools.train.workers=64")
    assert done.returncode == 2
    cores = len(os.sched_getaffinity(0))
    assert "error[FR051] --set:1:" in done.stderr
    assert f"the pools ask for 64 CPU; present: {cores} CPU" in done.stderr
    assert "pools.train asks for 64 workers: 64 CPU" in done.stderr
    assert "pools.cpu asks for 1 worker: 0 CPU" in done.stderr
    assert "fix: " in done.stderr


def test_numbers_written_like_1e_minus_6_are_numbers() -> None:
    done, _ = command(
        "show", "../../../pipelines/grpo_sync.yaml", "--as", "resolved", "--set", "models.policy.optimizer.lr=1e-6"
    )
    assert done.returncode == 0
    assert "lr: 1e-06" in done.stdout or "lr: 0.000001" in done.stdout
