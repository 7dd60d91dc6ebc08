"""Texts that people read, word for word. `pytest --update-golden` writes them anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.errors import PipelineError, Place, Problem
from flowrl.graph.plan import Plan
from flowrl.graph.show.data import as_data
from flowrl.graph.show.report import as_plan
from flowrl.pipeline import load
from flowrl.simulate.compare import compare
from flowrl.simulate.estimate import estimate
from flowrl.simulate.report import as_text

Golden = Callable[[str, str], None]
PIPELINE = Path(__file__).parents[2] / "pipelines" / "grpo_sync.yaml"
BIG = PIPELINE.with_name("qwen_gsm8k_8gpu.yaml")
SETS = ("batch.prompts=2", "batch.group=3", "nodes.actor_update.minibatch=2")

LINE = "  advantage: {use: advantage.grpo}"
FULL = Problem(
    "FR020",
    Place("pipelines/my_grpo.yaml", 24, 3, 9, LINE, "nodes.advantage"),
    "nodes.advantage reads 'reward', which nothing writes",
    "reads: {reward: reward_math}",
    ("'reward_math' (Sample[float], written by reward) has the right type", "did you mean 'reward_math'?"),
)
BARE = Problem("FR001", Place("nowhere.yaml"), "the file is missing", severity="warning")
WIDE = Problem("FR005", Place("p.yaml", 12345, 7, 400, "abc: {defg: 1}"), "unknown key")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return load(PIPELINE, SETS).plan()


def test_a_problem_looks_like_that_of_a_good_compiler(golden: Golden) -> None:
    golden("problem.txt", "\n\n".join(problem.render() for problem in (FULL, BARE, WIDE)) + "\n")


def test_several_problems_are_one_error() -> None:
    assert str(PipelineError([FULL, BARE])) == f"{FULL.render()}\n\n{BARE.render()}"


def test_the_plan_of_the_default_pipeline_looks_as_it_did(golden: Golden, plan: Plan) -> None:
    golden("plans/grpo_sync.plan.txt", as_plan(plan) + "\n")
    golden("plans/grpo_sync.json", json.dumps(as_data(plan), indent=1) + "\n")


def test_the_plan_of_a_7b_model_looks_as_it_did(golden: Golden) -> None:
    plan = load(BIG).plan()
    golden("plans/qwen_gsm8k_8gpu.plan.txt", as_plan(plan) + "\n")
    golden("plans/qwen_gsm8k_8gpu.json", json.dumps(as_data(plan), indent=1) + "\n")


@pytest.mark.parametrize("name", ["grpo_sync", "grpo_separate_async"])
def test_a_comparison_of_schedules_looks_as_it_did(golden: Golden, name: str) -> None:
    plan = load(PIPELINE.with_name(f"{name}.yaml")).plan()
    golden(f"plans/{name}.compare.txt", as_text(compare(plan, lambda one: estimate(one, "cpu"), steps=12)) + "\n")


def test_the_dry_run_names_each_node_with_pool_fields_shapes_and_next_readers(plan: Plan) -> None:
    text = as_plan(plan)
    assert len(plan.graph.nodes) == 7
    for node in plan.graph.nodes.values():
        block = text.split(f"\n{node.name}: ")[1].split("\n\n")[0]
        assert plan.pool_of(node) in block
        for field in plan.reads(node):
            (line,) = (line for line in block.splitlines() if line.startswith(f"  reads  {field.name} "))
            assert f"{field.type}" in line
            assert field.type.shape(2, 3) in line
            assert line.endswith(f"written by {field.writer}")
        for field in plan.writes(node):
            (line,) = (line for line in block.splitlines() if line.startswith(f"  writes {field.name} "))
            assert line.endswith(f"next read by {', '.join(plan.readers(field)) or 'nobody'}")
