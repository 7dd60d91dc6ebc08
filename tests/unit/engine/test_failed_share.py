"""A run stops when more than a set share of a step's rows fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import flowrl
from flowrl.errors import RunError

REWARDS = """
def score(response, answer):
    if response in ("0", "1", "2"):
        raise ValueError(f"no verdict on {response}")
    return float(len(response))
"""


def pipeline(folder: Path, texts: list[Any], **changes: Any) -> flowrl.Pipeline:
    (folder / "rewards.py").write_text(REWARDS)
    reward = {"use": "reward.function", "call": "./rewards.py:score"}
    return flowrl.Pipeline(
        {
            "flowrl": 1,
            "name": "shares",
            "models": {"policy": {"path": "arith-tiny"}},
            "data": {"train": {"type": "arithmetic", "size": 8}},
            "batch": {"prompts": 1, "group": 8},
            "pools": {"generate": {"workers": 1}},
            "nodes": {
                "rollout": {
                    "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake",
                    "max_tokens": 8, "script": {"texts": texts},
                },
                "reward": {**reward, **changes.pop("reward", {})},
                "advantage": {"use": "advantage.grpo"},
            },
            "run": {"steps": 1, "dir": str(folder / "runs"), **changes},
        },
        folder,
    )  # fmt: skip


THREE_OF_EIGHT = list("01234567")


@pytest.mark.parametrize("policy", [{}, {"on_error": "drop"}])
def test_more_failures_than_the_limit_end_the_run_and_fewer_do_not(tmp_path: Path, policy: dict[str, str]) -> None:
    result = pipeline(tmp_path, THREE_OF_EIGHT, max_failed=0.5, reward=policy).run(local=True, quiet=True)
    assert result.metrics[0]["rows/failed"] == 3
    assert result.metrics[0]["reward/mean"] == 1.0
    with pytest.raises(RunError) as caught:
        pipeline(tmp_path, THREE_OF_EIGHT, max_failed=0.25, reward=policy).run(local=True, quiet=True)
    error = caught.value
    assert error.fact == (
        "3 of 8 rows of step 1 failed (run.max_failed: 0.25), the first with ValueError: no verdict on 0"
    )
    assert error.node == "reward"
    assert "rewards.py" in error.details


def test_the_limit_itself_is_allowed(tmp_path: Path) -> None:
    pipeline(tmp_path, THREE_OF_EIGHT, max_failed=0.375).run(local=True, quiet=True)


def test_a_reward_that_always_fails_ends_the_run_and_a_bad_batch_does_not(tmp_path: Path) -> None:
    pipeline(tmp_path, [*"0000000", "x"]).run(local=True, quiet=True)
    with pytest.raises(RunError, match="every row of step 1 failed, the first with ValueError"):
        pipeline(tmp_path, ["0"]).run(local=True, quiet=True)
    assert pipeline(tmp_path, ["0"], max_failed=1.0).run(local=True, quiet=True).metrics[0]["rows/failed"] == 8


def test_lost_sessions_count_too(tmp_path: Path) -> None:
    texts = [None] * 5 + list("abc")
    pipeline(tmp_path, texts, max_failed=0.7).run(local=True, quiet=True)
    with pytest.raises(RunError, match=r"5 of 8 rows of step 1 failed \(run\.max_failed: 0\.5\)"):
        pipeline(tmp_path, texts, max_failed=0.5).run(local=True, quiet=True)
