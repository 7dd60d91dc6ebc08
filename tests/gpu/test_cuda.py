"""What only a CUDA device can show; skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

import flowrl

DEFAULT = Path(__file__).parents[2] / "pipelines" / "grpo_sync.yaml"


@pytest.mark.gpu
def test_the_default_pipeline_learns_on_a_gpu(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    result = flowrl.load(DEFAULT, [f"run.dir={tmp_path}", "run.steps=20", "tracking=null"]).run(quiet=True)
    rewards = [line["reward/mean"] for line in result.metrics]
    assert result.metrics[0]["mismatch/log_ratio"] < 1e-3
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5
