"""Cutting a graph: what leads to chosen nodes, and leaving out what nobody needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.pipeline import Pipeline, load

DEFAULT = Path(__file__).parents[3] / "pipelines" / "grpo_sync.yaml"
NO_KL = "nodes.actor_update.kl_coef=0"


def nodes(pipeline: Pipeline) -> set[str]:
    return set(pipeline.plan().graph.nodes)


def test_to_nodes_keeps_a_node_and_what_it_needs() -> None:
    pipeline = load(DEFAULT, to_nodes=["advantage"])
    assert pipeline.check() == ()
    plan = pipeline.plan()
    assert set(plan.graph.nodes) == set(plan.document.nodes) == {"rollout", "reward", "advantage"}
    assert set(plan.document.models) == {"policy"}
    assert set(plan.pools) == {"cpu", "train"}


def test_several_goals_are_united_and_a_mistake_elsewhere_does_not_count() -> None:
    sets = ["nodes.actor_update.reads={advantages: nowhere}"]
    assert [problem.code for problem in load(DEFAULT, sets).check()] == ["FR020"]
    pipeline = load(DEFAULT, sets, ["ref_logprob", "reward"])
    assert pipeline.check() == ()
    assert nodes(pipeline) == {"rollout", "reward", "ref_logprob"}


def test_an_update_as_the_goal_leaves_the_sync_out() -> None:
    (problem,) = load(DEFAULT, to_nodes=["actor_update"]).check()
    assert (problem.code, problem.fix) == ("FR023", "--to-nodes weight_sync"), (
        "it would generate with the first weights"
    )
    assert nodes(load(DEFAULT, to_nodes=["weight_sync"])) == nodes(load(DEFAULT))


@pytest.mark.parametrize(("goal", "fix"), [("advantge", "did you mean 'advantage'?"), ("", "known: actor_update")])
def test_an_unknown_goal_is_an_error_with_the_nearest_name(goal: str, fix: str) -> None:
    (problem,) = load(DEFAULT, to_nodes=[goal]).check()
    assert (problem.code, problem.place.file) == ("FR009", "--to-nodes")
    assert problem.fix.startswith(fix)


def test_a_reference_that_nobody_reads_is_named_with_its_reason_and_its_model() -> None:
    (problem,) = load(DEFAULT, [NO_KL]).check()
    assert (problem.code, problem.severity, problem.place.path) == ("FR030", "warning", "nodes.ref_logprob")
    assert problem.notes == (
        "nodes.actor_update does not read 'ref_log_probs' with these settings (kl_coef: 0.0)",
        "only it uses models.reference",
    )


def test_prune_leaves_it_out_with_its_model() -> None:
    pipeline = load(DEFAULT, [NO_KL, "run.prune=true"])
    assert pipeline.check() == ()
    plan = pipeline.plan()
    assert "ref_logprob" not in plan.graph.nodes
    assert set(plan.document.models) == {"policy"}
    assert plan.whole is not None
    assert plan.whole.graph.nodes.keys() - plan.graph.nodes.keys() == {"ref_logprob"}
    assert "ref_log_probs" not in plan.graph.fields


def test_prune_follows_a_chain_and_one_warning_names_it_whole() -> None:
    chain = [
        "nodes.shape={use: reward.length_penalty, budget: 8, writes: {shaped_reward: raw}}",
        "nodes.more={use: reward.length_penalty, budget: 8, reads: {reward: raw}, writes: {shaped_reward: unread}}",
    ]
    (problem,) = load(DEFAULT, chain).check()
    assert problem.place.path == "nodes.more"
    assert problem.notes == ("only it needs nodes.shape",)
    assert nodes(load(DEFAULT, [*chain, "run.prune=true"])) == nodes(load(DEFAULT))


def test_a_reader_of_trained_weights_is_no_need_of_the_update() -> None:
    extra = "nodes.extra={use: model.logprob, model: policy, pool: train, writes: {log_probs: unread}}"
    (problem,) = load(DEFAULT, [extra]).check()
    assert problem.place.path == "nodes.extra"
    pruned = load(DEFAULT, [extra, "run.prune=true"])
    assert pruned.check() == ()
    assert nodes(pruned) == nodes(load(DEFAULT))
    assert "extra" not in nodes(load(DEFAULT, [extra], ["weight_sync"]))


def test_prune_changes_nothing_where_everything_is_needed_or_nothing_trains() -> None:
    plan = load(DEFAULT, ["run.prune=true"]).plan()
    assert plan.whole is None
    assert set(plan.graph.nodes) == nodes(load(DEFAULT))
    scoring = [f"nodes.{name}=null" for name in ("actor_update", "weight_sync", "old_logprob", "ref_logprob")]
    assert "advantage" in nodes(load(DEFAULT, [*scoring, "run.prune=true"]))


def test_the_document_of_a_pruned_pipeline_stays_whole() -> None:
    assert "ref_logprob" in load(DEFAULT, [NO_KL, "run.prune=true"]).resolved()
