"""Whatever a pipeline without an error is made of, every view of it can be drawn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.pipeline import VIEWS, load

NODES = ["rollout", "reward", "old_logprob", "ref_logprob", "advantage", "actor_update", "weight_sync"]
SETS = [
    "nodes.rollout.engine=fake",
    "nodes.old_logprob=null",
    "nodes.ref_logprob=null",
    "nodes.actor_update.minibatch=32",
    "nodes.actor_update.kl_coef=0",
    "nodes.actor_update.epochs=3",
    "nodes.advantage.every=2",
    "run.prune=true",
    "models.policy.parallel=fsdp2",
    "models.reference.dtype=bfloat16",
    "params.base=gpt2",
    "params.base=Qwen/Qwen3-30B-A3B",
    "params.base=nobody/knows",
    "pools.train.workers=3",
    "pools.train.memory_per_worker=900",
    "pools.generate={shares: null, workers: 2}",
    "batch.group=1",
    "schedule={mode: separate_async, max_staleness: 3, updates_per_sync: 2}",
    "schedule={mode: colocate_async}",
]
DRAWN = sorted(set(VIEWS) - {"svg"})


@settings(max_examples=60)
@given(st.lists(st.sampled_from(SETS), max_size=5, unique=True), st.lists(st.sampled_from(NODES), max_size=2))
def test_a_pipeline_without_an_error_can_be_drawn_in_every_view(sets: list[str], goals: list[str]) -> None:
    pipeline = load("grpo_sync", sets, goals)
    if any(problem.severity == "error" for problem in pipeline.check()):
        return
    for view in DRAWN:
        assert pipeline.draw(view)
    for view in set(DRAWN) - {"plan", "resolved"}:
        assert pipeline.draw(view, unroll=3)


@pytest.mark.parametrize("view", DRAWN)
def test_a_pipeline_that_holds_no_weights_can_be_drawn(view: str) -> None:
    text = load("grpo_sync", ["nodes.rollout.engine=fake"], ["reward"]).draw(view)
    assert "rollout" in text
    assert view != "plan" or "nothing: no node here holds weights" in text
