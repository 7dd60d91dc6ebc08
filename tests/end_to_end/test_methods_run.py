"""Every published method runs ten steps of the default task; `benchmarks/algorithms.py` asks what it learns."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from runs import ROOT, finish

METHODS = {
    "grpo": "actor/kl_loss", "dr_grpo": "actor/loss", "dapo": "groups/kept", "gspo": "actor/clip_fraction",
    "cispo": "actor/loss", "rloo": "actor/loss", "reinforce_plus_plus": "reward/kl", "remax": "greedy/tokens",
    "ppo": "critic/explained_variance", "grpo_kl_in_reward": "reward/kl_coef", "grpo_judge": "reward/mean",
    "distill_on_policy": "distill/reverse_kl",
}  # fmt: skip
"""With a metric that only such a method reports, or that says that it trains."""


@pytest.mark.parametrize("name", METHODS)
def test_it_runs_ten_steps(name: str, tmp_path: Path) -> None:
    done = finish(
        tmp_path, "run", ROOT / "pipelines" / f"{name}.yaml", "--steps", "10", "--set", "tracking=[]", "--local"
    )
    assert done.code == 0, done.out + done.err
    assert [step["step"] for step in done.metrics] == [*range(1, 11)]
    last = done.metrics[-1]
    assert all(math.isfinite(value) for value in last.values())
    assert METHODS[name] in last
    assert last["actor/grad_norm"] > 0
