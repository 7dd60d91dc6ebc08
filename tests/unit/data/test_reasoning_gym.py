"""Tasks of reasoning-gym."""

from __future__ import annotations

import json
from typing import Any

import pytest
from data_sets import faults, load_faults, types

from flowrl.data.reasoning_gym import ReasoningGym
from flowrl.data.stream import PromptStream


def test_rows_hold_prompt_answer_task_and_the_whole_entry() -> None:
    data = ReasoningGym(task="chain_sum", size=5, seed=3, config={"min_terms": 2, "max_terms": 2})
    assert types(data) == {"prompt": "str", "answer": "str", "data_source": "str", "entry": "json"}
    rows = data.load()
    assert len(rows) == 5
    for row in rows:
        assert set(row) == set(data.field_types())
        assert row["data_source"] == "chain_sum" == row["entry"]["metadata"]["source_dataset"]
        assert (row["prompt"], row["answer"]) == (row["entry"]["question"], row["entry"]["answer"])
        assert json.loads(json.dumps(row["entry"])) == row["entry"]


def test_the_same_settings_give_the_same_rows_and_another_seed_others() -> None:
    made = [list(ReasoningGym(task="chain_sum", size=4, seed=seed).load()) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]
    prints = [ReasoningGym(task=task, seed=seed).fingerprint() for task, seed in (("gcd", 0), ("gcd", 1), ("lcm", 0))]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("task", ["gcd", "countdown", "calendar_arithmetic", "time_intervals", "syllogism", "rearc"])
def test_the_scorer_of_a_task_takes_its_entry(task: str) -> None:
    from reasoning_gym import get_score_answer_fn

    row = ReasoningGym(task=task, size=1).load()[0]
    assert get_score_answer_fn(task)(row["answer"], row["entry"]) > 0


def test_a_task_without_an_answer_to_compare_with_has_no_such_column() -> None:
    assert types(ReasoningGym(task="graph_color", size=2)) == {"prompt": "str", "data_source": "str", "entry": "json"}


@pytest.mark.parametrize(
    ("settings", "path", "fact"),
    [
        ({"task": "chain_sums"}, "task", "no task 'chain_sums'"),
        ({"task": "gcd", "config": {"min_nubers": 3}}, "config.min_nubers", "no setting 'min_nubers'"),
        ({"task": "chain_sum", "config": {"min_terms": "3"}}, "config.min_terms", "a valid integer"),
        ({"task": "chain_sum", "config": {"min_terms": 0}}, "config.min_terms", "min_terms must be positive"),
        ({"task": "chain_sum", "config": {"seed": 3}}, "config.seed", "stands beside `task:`"),
        ({"task": "composite"}, "config", "at least one dataset"),
    ],
)
def test_what_a_task_does_not_take_is_told_at_its_key(settings: dict[str, Any], path: str, fact: str) -> None:
    data = ReasoningGym(**settings)
    ((where, said),) = faults(data)
    assert where == path
    assert fact in said
    assert types(data) == {}
    assert load_faults(data)[0].fact == said


def test_settings_of_other_kinds_than_numbers_are_taken() -> None:
    variables = ReasoningGym(task="polynomial_multiplication", size=2, config={"variables": ["u", "v"]})
    operators = ReasoningGym(task="basic_arithmetic", size=2, config={"operators": ["+"]})
    inner = [{"name": "gcd", "weight": 1.0, "config": {}}, {"name": "lcm", "weight": 2, "config": {}}]
    several = ReasoningGym(task="composite", size=2, config={"datasets": inner})
    assert faults(variables) == faults(operators) == faults(several) == []


def test_fewer_rows_than_a_batch_are_a_problem() -> None:
    assert faults(ReasoningGym(task="gcd", size=7), 8)[0][0] == "size"


def test_a_run_takes_rows_in_an_order_of_its_own() -> None:
    stream = PromptStream(ReasoningGym(task="gcd", size=6).load(), seed=0)
    assert sorted(prompt.uid for prompt in stream.take(6)) == [f"u{row}" for row in range(6)]
