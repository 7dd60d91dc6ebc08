"""Real runs of shipped pipelines, for benchmarks that ask what is learned."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def metric_of(name: str, pipeline: str, seed: int, steps: int, settings: Sequence[str] = ()) -> list[float]:
    """What a run of the command reports under a name, by steps that report it. Ends the program where the run fails."""
    given = [f"run.seed={seed}", "tracking=[]", "checkpoint=null", *settings]
    sets = [part for setting in given for part in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="flowrl-learn-") as folder:
        command = [sys.executable, "-m", "flowrl", "run", pipeline, "--steps", str(steps), *sets]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        (file,) = Path(folder).glob("runs/*/metrics.jsonl")
        reported = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [metrics[name] for metrics in reported if name in metrics]
