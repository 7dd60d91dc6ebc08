"""Runs of the real command on real Ray, and what is left behind by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "pipelines" / "grpo_sync.yaml"
MARK = "FLOWRL_TEST_FOLDER"
"""Environment variable by which the processes of a run are known."""
FAKE = """
flowrl: 1
name: fake
models: {policy: {path: arith-tiny}}
data: {train: {type: arithmetic, size: 64}}
batch: {prompts: 8, group: 4}
pools: {generate: {workers: 1}}
nodes:
  rollout: {use: rollout.generate, model: policy, pool: generate, engine: fake, max_tokens: 8}
  reward: {use: reward.exact_match}
  advantage: {use: advantage.grpo}
run: {steps: 2}
"""
"""A pipeline without a real model: starts fast, runs the real graph, store and workers."""


@dataclass(frozen=True)
class Finished:
    """A run of the command that has ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def run(self) -> Path:
        """The run folder."""
        (found,) = [path for path in self.folder.glob("runs/*") if path.is_dir() and path.name != "mlartifacts"]
        return found

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl."""
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]


def finish(folder: Path, *arguments: str | Path, timeout: float = 240) -> Finished:
    """Run `flowrl ARGUMENTS` in a folder and wait for its end."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "flowrl", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, env=environment(folder))
    return Finished(done.returncode, done.stdout, done.stderr, folder)


def environment(folder: Path) -> dict[str, str]:
    """The environment of a run: this checkout, nothing from a hub, no tracking server of the developer's."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "RAY_", "RANK", "WORLD"))
    }
    return kept | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "COLUMNS": "100", MARK: str(folder)}


def processes(folder: Path, name: str = "") -> set[int]:
    """Living processes that a run in this folder has started, whoever their parent is now."""
    mark, found = f"{MARK}={folder}\0".encode(), set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
                if state != "Z" and mark in (entry / "environ").read_bytes() + b"\0":
                    found |= {int(entry.name)} if name.encode() in (entry / "cmdline").read_bytes() else set()
            except OSError:
                continue
    return found


def gone(folder: Path, seconds: float = 5.0) -> bool:
    """Whether everything that a run in this folder has started is gone, soon after its end."""
    deadline = time.monotonic() + seconds
    while processes(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not processes(folder)
