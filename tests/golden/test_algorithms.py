"""The published methods: few lines over the default pipeline, each with its picture, its paper and its difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from flowrl.graph.diff import compare
from flowrl.graph.plan import Plan
from flowrl.graph.show.draw import as_mermaid
from flowrl.pipeline import load

ROOT = Path(__file__).parents[2]
METHODS = (
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "remax", "ppo", "grpo_kl_in_reward",
    "grpo_judge", "distill_on_policy",
)  # fmt: skip
MAX_LINES = 20
HEAD = """# The graphs of the algorithms

As `flowrl show NAME --as mermaid` draws them; [algorithms.md](algorithms.md) says what differs. A test keeps this page.
"""


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {name: load(ROOT / "pipelines" / f"{name}.yaml").plan() for name in ("grpo_sync", *METHODS)}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_few_lines_and_names_its_paper_and_its_row_in_the_docs(name: str) -> None:
    text = (ROOT / "pipelines" / f"{name}.yaml").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert lines[:2] == ["extends: grpo_sync.yaml", f"name: {name}"]
    assert len(lines) - 2 <= MAX_LINES
    papers = re.findall(r"arXiv:\d{4}\.\d{5}", text)
    assert papers
    row = next(
        line for line in (ROOT / "docs" / "algorithms.md").read_text().splitlines() if line.startswith(f"| [`{name}`]")
    )
    assert set(re.findall(r"arXiv:\d{4}\.\d{5}", row)) <= set(papers)


def test_the_page_of_pictures_is_what_the_graphs_are(
    golden: Callable[[str, str], None], plans: dict[str, Plan]
) -> None:
    parts = [f"## {name}\n\n```mermaid\n{as_mermaid(plans[name])}\n```\n" for name in METHODS]
    golden("../../docs/algorithm_graphs.md", "\n".join([HEAD, *parts]))


def test_each_two_of_them_differ_in_more_than_their_name(plans: dict[str, Plan]) -> None:
    for one, two in combinations(METHODS, 2):
        assert {change.section for change in compare(plans[one], plans[two])} - {"pipeline"}, (one, two)
