"""`flowrl check` and `flowrl plan` answer at once: nothing heavy is imported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flowrl

ROOT = Path(__file__).parents[2]
PIPELINE = "pipelines/grpo_sync.yaml"
HEAVY = ("torch", "ray", "vllm", "mlflow", "transformers", "accelerate", "pyarrow")
SCRIPT = """
import sys
from flowrl.cli import app
app({arguments}, standalone_mode=False)
print("heavy:", [name for name in {heavy} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        f"check {PIPELINE}",
        f"plan {PIPELINE}",
        f"plan {PIPELINE} --format json",
        f"diff {PIPELINE} {PIPELINE}",
        "nodes",
        *(f"show {PIPELINE} --as {view}" for view in ("tree", "mermaid", "dot", "html", "json", "resolved")),
    ],
)
def test_nothing_heavy_is_imported(command: str) -> None:
    script = SCRIPT.format(arguments=command.split(), heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_check_answers_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "flowrl", "check", PIPELINE], cwd=ROOT, check=True, capture_output=True)
        seconds.append(time.perf_counter() - start)
    with capsys.disabled():
        print(f"\nflowrl check {PIPELINE}: {min(seconds):.2f} s, best of 3 (budget 1 s on an idle machine)")
    assert min(seconds) < 3


@pytest.mark.parametrize("name", flowrl.__all__)
def test_no_module_hides_a_public_name(name: str) -> None:
    assert importlib.util.find_spec(f"flowrl.{name}") is None, f"after its import flowrl.{name} would be the module"
