"""ReMax: two rollouts of one model, each with rows of its own, that meet in a value per prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flowrl

REWARDS = """
def score(response):
    return float(response)
"""


def remax(folder: Path, greedy: dict[str, Any], mode: str = "sync", prompts: int = 4) -> flowrl.Pipeline:
    """Four sampled responses to each prompt, worth 0, 1, 2 and 3, and a greedy one."""
    (folder / "rewards.py").write_text(REWARDS)
    reward = {"use": "reward.function", "call": "./rewards.py:score"}
    engine = {"model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 8}
    return flowrl.Pipeline(
        {
            "flowrl": 1,
            "name": "remax",
            "models": {"policy": {"path": "arith-tiny"}},
            "data": {"train": {"type": "arithmetic", "size": 8}},
            "batch": {"prompts": prompts, "group": 4},
            "pools": {"generate": {"workers": 1}},
            "nodes": {
                "rollout": {"use": "rollout.generate", **engine, "script": {"texts": list("0123")}},
                "greedy": {"use": "rollout.greedy", **engine, "script": greedy},
                "reward": reward,
                "greedy_reward": {
                    **reward, "reads": {"response": "greedy_response"},
                    "writes": {"reward": "greedy_reward", "reward_info": "greedy_info"},
                },
                "baseline": {"use": "reward.baseline", "reads": {"reward": "greedy_reward"}},
                "advantage": {"use": "advantage.remax"},
            },
            "schedule": {"mode": mode},
            "run": {"steps": 2, "dir": str(folder / "runs"), "max_failed": 1.0},
        },
        folder,
    )  # fmt: skip


def test_every_sample_is_compared_with_the_one_greedy_response_to_its_prompt(tmp_path: Path) -> None:
    result = remax(tmp_path, {"texts": ["2"]}).run(local=True, quiet=True)
    for step in result.metrics:
        assert step["reward/mean"] == 1.5
        assert step["reward/baseline"] == 2
        assert (step["advantage/min"], step["advantage/max"]) == (-2, 1)
        assert step["advantage/abs"] == 1
        assert step["rollout/tokens"] == 4 * step["greedy/tokens"]


def test_a_greedy_response_that_nobody_can_score_leaves_its_sessions_out(tmp_path: Path) -> None:
    result = remax(tmp_path, {"texts": ["no number"]}).run(local=True, quiet=True)
    assert [step["reward/unscored"] for step in result.metrics] == [16, 16]


def test_a_prompt_without_a_greedy_response_is_not_trained(tmp_path: Path) -> None:
    result = remax(tmp_path, {"texts": ["1"], "fail": 0.5}, prompts=8).run(local=True, quiet=True)
    first = result.metrics[0]
    assert 0 < first["rows/failed"] < 8
    assert first["reward/unscored"] == 4 * first["rows/failed"]
    assert (first["advantage/min"], first["advantage/max"]) == (-1, 2)


def test_the_plan_counts_one_session_of_each_prompt(tmp_path: Path) -> None:
    plan = remax(tmp_path, {}).plan()
    shapes = {name: plan.shape(field) for name, field in plan.graph.fields.items()}
    assert shapes["greedy_response"] == shapes["greedy_reward"] == shapes["baseline"] == shapes["prompt"] == "(4)"
    assert shapes["response"] == shapes["reward"] == "(16)"
    assert shapes["advantages"] == "(16, tokens)"
