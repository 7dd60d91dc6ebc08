"""`flowrl check` and `flowrl plan` answer at once: nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIPELINE = "pipelines/grpo_sync.yaml"
HEAVY = ("torch", "ray", "vllm", "mlflow", "transformers", "accelerate", "pyarrow")
SHOW = f"import sys; print('heavy:', [name for name in {HEAVY} if name in sys.modules])"


@pytest.mark.parametrize(
    "script",
    [
        "import flowrl.cli",
        f"from pathlib import Path; from flowrl.commands import check_pipelines; assert check_pipelines([Path({PIPELINE!r})], []) == 0",
        f"from pathlib import Path; from flowrl.commands import show_plan; assert show_plan(Path({PIPELINE!r}), []) == 0",
        f"from pathlib import Path; from flowrl.commands import show_pipeline; assert show_pipeline(Path({PIPELINE!r}), [], 'json') == 0",
        "from flowrl.commands import show_nodes; assert show_nodes(None) == 0",
    ],
    ids=["import", "check", "plan", "show", "nodes"],
)
def test_nothing_heavy_is_imported(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"{script}\n{SHOW}"], cwd=ROOT, capture_output=True, text=True)
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
