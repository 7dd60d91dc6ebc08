"""Every line of YAML on the page of the rewards is one that the check takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import flowrl
from flowrl.registry import library_names

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
RUN_TIME = ("FR030", "FR031")
"""What only a whole pipeline, or another machine, could satisfy: that somebody reads what is written, a key."""


def pieces(block: str) -> list[dict[str, Any]]:
    """A block as sections of a document: itself, or its nodes, those of one name one by one."""
    if block.startswith("models:"):
        return [yaml.safe_load(block)]
    lines = [yaml.safe_load(line) for line in block.splitlines()]
    names = [name for line in lines for name in line]
    if len(set(names)) == len(names):
        return [{"nodes": {name: node for line in lines for name, node in line.items()}}]
    return [{"nodes": line} for line in lines]


@pytest.mark.parametrize("piece", [piece for block in BLOCKS for piece in pieces(block)], ids=str)
def test_what_the_page_says_passes_the_check(piece: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text("def score(response, answer):\n    return float(answer in response)\n")
    rollout = {"use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 80}
    models = {"policy": {"path": "arith-tiny"}, "judge": {"path": "arith-tiny"}, "rm": {"path": "arith-tiny"}}
    pipeline = flowrl.Pipeline(
        {
            "flowrl": 1,
            "name": "page",
            "models": models,
            "data": {"train": {"type": "reasoning_gym", "task": "chain_sum", "size": 8}},
            "batch": {"prompts": 2, "group": 2},
            "pools": {"generate": {"workers": 1}, "judging": {"workers": 1}, "scoring": {"workers": 1}},
            "nodes": {"rollout": rollout, **piece["nodes"]},
        },
        tmp_path,
    )
    assert [problem.render() for problem in pipeline.check() if problem.code not in RUN_TIME] == []


def test_the_page_shows_every_reward() -> None:
    shown = {node["use"] for block in BLOCKS for piece in pieces(block) for node in piece["nodes"].values()}
    assert {name for name in library_names() if name.startswith("reward.")} - {
        "reward.length_penalty",
        "reward.kl_penalty",
    } <= shown
