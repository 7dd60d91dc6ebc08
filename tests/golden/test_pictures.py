"""Pictures of the shipped pipeline, word for word. `pytest --update-golden` writes them anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.graph.plan import Plan
from flowrl.graph.show.draw import as_dot, as_mermaid, as_picture_data, as_tree
from flowrl.pipeline import load

Golden = Callable[[str, str], None]
PIPELINE = Path(__file__).parents[2] / "pipelines" / "grpo_sync.yaml"
SETS = ("batch.prompts=2", "batch.group=3", "nodes.actor_update.minibatch=1")
ASYNC = (
    "schedule={mode: separate_async, max_staleness: 2, updates_per_sync: 2}",
    "pools.generate={shares: null, workers: 1}",
)
FORMS = {"tree": as_tree, "mermaid": as_mermaid, "dot": as_dot}


@pytest.fixture(scope="module")
def sync() -> Plan:
    return load(PIPELINE, SETS).plan()


@pytest.fixture(scope="module")
def separate() -> Plan:
    return load(PIPELINE, SETS + ASYNC).plan()


@pytest.mark.parametrize("form", FORMS)
def test_the_default_pipeline_looks_as_it_did(golden: Golden, sync: Plan, form: str) -> None:
    golden(f"pictures/grpo_sync.{form}.txt", FORMS[form](sync) + "\n")


@pytest.mark.parametrize("form", FORMS)
def test_the_default_pipeline_unrolled_looks_as_it_did(golden: Golden, sync: Plan, form: str) -> None:
    golden(f"pictures/grpo_sync_2_steps.{form}.txt", FORMS[form](sync, unroll=2) + "\n")


@pytest.mark.parametrize("form", FORMS)
def test_asynchronous_steps_look_as_they_did(golden: Golden, separate: Plan, form: str) -> None:
    golden(f"pictures/separate_async_4_steps.{form}.txt", FORMS[form](separate, unroll=4) + "\n")


def test_an_asynchronous_schedule_on_one_step_looks_as_it_did(golden: Golden, separate: Plan) -> None:
    golden("pictures/separate_async.mermaid.txt", as_mermaid(separate) + "\n")


def test_a_tree_in_color_looks_as_it_did(golden: Golden, sync: Plan) -> None:
    golden("pictures/grpo_sync.color.txt", as_tree(sync, color=True) + "\n")


def test_the_picture_as_data_looks_as_it_did(golden: Golden, sync: Plan) -> None:
    golden("pictures/grpo_sync_2_steps.json", json.dumps(as_picture_data(sync, 2), indent=1) + "\n")
