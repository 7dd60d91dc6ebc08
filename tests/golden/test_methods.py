"""Methods beyond the library can be written and checked: each within 20 lines over the default pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.graph.plan import Plan
from flowrl.pipeline import load

FOLDER = Path(__file__).parent / "composition"
FILES = {file.stem: file for file in sorted(FOLDER.glob("*.yaml"))}
Golden = Callable[[str, str], None]


def edges(plan: Plan) -> set[tuple[str, str, str]]:
    """Source, what it carries, and target of every edge."""
    return {(edge.source, edge.shown, edge.target) for edge in plan.graph.edges}


def described(plan: Plan) -> str:
    """Levels and edges as text."""
    levels = [f"{number}  {', '.join(level)}" for number, level in enumerate(plan.graph.levels, 1)]
    lines = [
        f"{edge.source} -[{edge.shown}]-> {edge.target}" + " of the next step" * edge.distance
        for edge in plan.graph.edges
    ]
    return "\n".join(["levels", *levels, "", "edges", *lines]) + "\n"


def test_all_four_are_here() -> None:
    assert list(FILES) == ["distill_on_policy", "dynamic_sampling", "judge_reward", "ppo_critic"]


@pytest.mark.parametrize("name", FILES)
def test_a_method_is_written_in_20_lines_and_checked(name: str, golden: Golden) -> None:
    lines = [line for line in FILES[name].read_text().splitlines() if line.strip() and line.lstrip()[0] != "#"]
    assert lines[0] == "extends: ../../../pipelines/grpo_sync.yaml"
    assert len(lines) <= 20
    pipeline = load(FILES[name])
    assert [problem for problem in pipeline.check() if problem.severity == "error"] == []
    assert {problem.code for problem in pipeline.check()} <= {"FR079"}, "and nothing in it is wasted"
    golden(f"composition/{name}.txt", described(pipeline.plan()))


def test_the_critic_is_read_before_it_is_trained_and_never_synced() -> None:
    plan = load(FILES["ppo_critic"]).plan()
    found = edges(plan)
    assert {
        ("values", "values", "advantage"),
        ("values", "values", "value_update"),
        ("values", "weights of critic", "value_update"),
        ("advantage", "returns", "value_update"),
        ("advantage", "advantages", "actor_update"),
        ("ref_logprob", "ref_log_probs", "advantage"),
    } <= found
    order = plan.graph.order.index
    assert order("values") < order("advantage") < order("value_update")
    assert not any(carried == "weights of critic" and target != "value_update" for _, carried, target in found)
    assert not any({"value_update", "actor_update"} == {source, target} for source, _, target in found)


def test_the_judge_scores_beside_the_rule_on_workers_of_its_own() -> None:
    plan = load(FILES["judge_reward"]).plan()
    found = edges(plan)
    assert {
        ("data", "answer", "judge"),
        ("rollout", "response", "judge"),
        ("judge", "judge_reward", "total"),
        ("reward", "exact_reward", "total"),
        ("total", "reward", "advantage"),
    } <= found
    assert ("reward", "exact_reward", "advantage") not in found
    assert {"judge", "reward"} <= set(plan.graph.levels[1])
    assert plan.pools["judge"].workers == 2


def test_the_teacher_takes_the_place_of_reward_and_reference() -> None:
    plan = load(FILES["distill_on_policy"]).plan()
    assert {
        ("rollout", "response_ids", "teacher_logprob"),
        ("teacher_logprob", "teacher_log_probs", "advantage"),
        ("old_logprob", "old_log_probs", "advantage"),
        ("old_logprob", "weights of policy", "actor_update"),
    } <= edges(plan)
    assert {"reward", "ref_logprob"}.isdisjoint(plan.graph.nodes)
    assert "reference" not in {node.model for node in plan.graph.nodes.values()}


def test_the_gate_comes_before_whatever_reads_the_batch() -> None:
    plan = load(FILES["dynamic_sampling"]).plan()
    waiting = {target for source, carried, target in edges(plan) if (source, carried) == ("informative", "gate keep")}
    assert waiting == {"old_logprob", "ref_logprob", "advantage", "actor_update"}
    order = plan.graph.order.index
    assert order("rollout") < order("reward") < order("informative") < min(map(order, waiting))


MISTAKES = [
    ("ppo_critic", "models.critic.trainable=false", "FR024"),
    ("ppo_critic", "models.critic.head=lm", "FR033"),
    ("ppo_critic", "nodes.value_update.model=policy", "FR033"),
    ("ppo_critic", "nodes.values.pool=generate2", "FR012"),
    ("ppo_critic", "nodes.value_update.minibatch=24", "FR060"),
    ("judge_reward", "nodes.second={use: reward.exact_match}", "FR021"),
    ("judge_reward", "nodes.total.coefficients=[1.0]", "FR026"),
    ("judge_reward", "nodes.judge.pool=cpu", "FR050"),
    ("judge_reward", "nodes.total.reads.rewards=[exact_reward, judge_rewrd]", "FR020"),
    ("distill_on_policy", "nodes.teacher_logprob.writes={log_probs: teacher_logprobs}", "FR020"),
    ("distill_on_policy", "models.teacher=null", "FR010"),
    ("distill_on_policy", "nodes.actor_update.kl_coef=0.1", "FR020"),
    ("dynamic_sampling", "nodes.informative.gate=kept", "FR028"),
    ("dynamic_sampling", "nodes.informative.reads={reward: advantages}", "FR022"),
    ("dynamic_sampling", "nodes.reward.gate=reward", "FR028"),
]


@pytest.mark.parametrize(("name", "mistake", "code"), MISTAKES)
def test_a_typical_mistake_is_one_error(name: str, mistake: str, code: str) -> None:
    found = load(FILES[name], [mistake]).check()
    assert [problem.code for problem in found if problem.severity == "error"] == [code]
