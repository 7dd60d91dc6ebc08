"""Whole simulated runs: the figures that can be worked out by hand, and the bounds that always hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl
from flowrl.engine.loop import Loop
from flowrl.graph.plan import Plan
from flowrl.simulate.compare import Comparison, compare
from flowrl.simulate.costs import Costs, Decoding, Drawn, Observed, Response
from flowrl.simulate.run import Outcome, simulate
from flowrl.simulate.variants import NotComparable, Team, schedules, team_of, under
from flowrl.spec.document import SeparateAsyncSchedule

STUBS = Path(__file__).parents[2] / "stub_nodes.py"
EVEN = Observed((Response(100.0, 1.0),))
"""Responses that are all equally long."""


def document(**more: Any) -> dict[str, Any]:
    return {
        "flowrl": 1,
        "name": "simulated",
        "models": {"policy": {"path": "arith-tiny", "trainable": True}},
        "data": {"train": {"type": "arithmetic", "size": 64}},
        "batch": {"prompts": 8, "group": 4},
        "pools": {"train": {"workers": 1}, "generate": {"shares": "train"}},
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 100,
            },
            "reward": {"use": "reward.exact_match"},
            "advantage": {"use": "advantage.grpo"},
            "update": {"use": f"{STUBS}:Update", "model": "policy", "pool": "train"},
            "sync": {"use": "sync.weights", "model": "policy"},
        },
        **more,
    }  # fmt: skip


def plan_of(**more: Any) -> Plan:
    return flowrl.Pipeline(document(**more)).plan()


def costs(lengths: Drawn | Observed = EVEN, train: float = 1.0, **more: Any) -> Costs:
    """Generation takes a second for 100 tokens, a batch of 8 groups `train` seconds, all else nothing."""
    groups = {"reward": 0.0, "advantage": 0.0, "update": train / 8}
    base = Costs("made up", groups, {"rollout": Decoding(lengths, 0.01)}, {"sync": 0.0}, 0.0)
    return replace(base, **more)


def outcomes(plan: Plan, given_costs: Costs, steps: int = 20) -> dict[str, Outcome]:
    return {each.plan.document.schedule.mode: each for each in compared(plan, given_costs, steps).outcomes}


def compared(plan: Plan, given_costs: Costs, steps: int = 20) -> Comparison:
    return compare(plan, lambda _: given_costs, steps)


def test_under_sync_a_step_is_generation_then_training() -> None:
    sync = outcomes(plan_of(), costs(train=3.0))["sync"]
    assert sync.step_seconds == pytest.approx(4.0)
    assert sync.median_seconds == pytest.approx(4.0)
    assert sync.tokens_per_second == pytest.approx(8 * 100 / 4.0)
    assert sync.bubble == pytest.approx(0.0)
    assert sync.idle == {"cpu": pytest.approx(1.0), "train": pytest.approx(0.0)}
    assert sync.staleness == {0: 1.0}
    assert sync.given_up == {}


def test_where_both_cost_the_same_separate_workers_halve_the_step() -> None:
    found = outcomes(plan_of(), costs())
    assert found["sync"].step_seconds == pytest.approx(2.0)
    assert found["separate_async"].step_seconds == pytest.approx(1.0, rel=0.02)
    assert found["separate_async"].bubble == pytest.approx(0.0, abs=0.02)
    assert found["separate_async"].staleness == {1: 1.0}


def test_what_trains_slowly_leaves_the_rollout_idle() -> None:
    found = outcomes(plan_of(), costs(train=4.0))["separate_async"]
    assert found.step_seconds == pytest.approx(4.0, rel=0.02)
    assert found.idle["generate"] == pytest.approx(0.75, abs=0.02)
    assert found.bubble == pytest.approx(0.375, abs=0.02)


def test_a_tail_hides_behind_training_where_requests_are_kept() -> None:
    tail = Observed((*[Response(100.0, 1.0)] * 7, Response(1000.0, 1.0)))
    found = outcomes(plan_of(schedule={"mode": "colocate_async", "max_staleness": 2}), costs(tail), steps=60)
    assert found["colocate_async"].step_seconds < 0.7 * found["sync"].step_seconds
    assert found["colocate_async"].bubble == pytest.approx(0.0, abs=0.02)


def test_nothing_is_kept_of_groups_that_were_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are still being generated and scored when they go: what comes of that has no reader."""
    num_left: list[int] = []
    end = Loop.end

    async def counted(loop: Loop, step: int) -> None:
        await end(loop, step)
        held = loop.front.flow.groups.keys()
        num_left.append(sum(not part.uids & held for part in loop.store._parts))

    monkeypatch.setattr(Loop, "end", counted)
    tail = Observed((*[Response(100.0, 1.0)] * 7, Response(1000.0, 1.0)))
    plan = plan_of(schedule={"mode": "colocate_async", "max_staleness": 1})
    assert outcomes(plan, costs(tail), steps=20)["colocate_async"].given_up["stale"] > 10
    assert set(num_left) == {0}


def test_costs_of_calls_and_syncs_are_part_of_a_step() -> None:
    found = outcomes(plan_of(), costs(call_seconds=0.01, sync_seconds={"sync": 0.5}))["sync"]
    assert found.step_seconds == pytest.approx(1.0 + 1.0 + 0.5 + 2 * 0.01)  # two calls that wait for each other


def test_more_workers_share_the_groups() -> None:
    plan = plan_of(pools={"train": {"workers": 4}, "generate": {"shares": "train"}})
    slow = costs(decoding={"rollout": Decoding(EVEN, 0.0, 0.01)}, train=8.0)
    assert outcomes(plan, slow)["sync"].step_seconds == pytest.approx(2 * 1.0 + 8.0 / 4)


def test_a_gate_asks_for_more_prompts_until_enough_are_kept() -> None:
    nodes = {**document()["nodes"], "informative": {"use": "filter.informative", "gate": "keep", "max_rounds": 40}}
    for mode in ("sync", "separate_async"):
        found = outcomes(plan_of(nodes=nodes, schedule={"mode": "sync"}), costs(kept=0.5, group_seconds={
            "reward": 0.0, "advantage": 0.0, "update": 0.1, "informative": 0.0}))[mode]  # fmt: skip
        assert len(found.trained) == 8 * 20
        assert found.given_up["filtered"] == pytest.approx(8 * 20, rel=0.3)


def test_what_a_gate_refuses_is_replaced_while_a_batch_trains() -> None:
    nodes = {**document()["nodes"], "informative": {"use": "filter.informative", "gate": "keep", "max_rounds": 40}}
    seconds = {"reward": 0.0, "advantage": 0.0, "update": 4.0 / 8, "informative": 0.0}
    found = outcomes(plan_of(nodes=nodes), costs(kept=0.8, group_seconds=seconds))["separate_async"]
    assert found.step_seconds == pytest.approx(4.0, rel=0.02), "four rounds of a second find eight groups"


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    lengths = Drawn(50.0, 100, 4)
    first, again = (outcomes(plan_of(), costs(lengths)) for _ in range(2))
    other = outcomes(plan_of(run={"seed": 1}), costs(lengths))
    for mode, found in first.items():
        assert found.ends == again[mode].ends
        assert found.spans == again[mode].spans
        assert found.ends != other[mode].ends


@settings(max_examples=25)
@given(
    train=st.floats(0.0, 3.0), mean=st.floats(1.0, 80.0), ahead=st.integers(0, 2), slack=st.integers(0, 3),
    stale=st.sampled_from(["drop", "wait"]), seed=st.integers(0, 9), call=st.sampled_from([0.0, 0.01]),
)  # fmt: skip
def test_whatever_things_cost_the_bounds_of_the_schedules_hold(
    train: float, mean: float, ahead: int, slack: int, stale: str, seed: int, call: float
) -> None:
    schedule = {"mode": "colocate_async", "warmup_batches": ahead, "max_staleness": slack, "stale": stale}
    plan = plan_of(schedule=schedule, run={"seed": seed})
    given_costs = costs(Drawn(mean, 100, 4), train, call_seconds=call, sync_seconds={"sync": 0.1})
    for found in outcomes(plan, given_costs, steps=8).values():
        assert len(found.ends) == 8
        assert len(found.trained) == 8 * 8
        assert max(each.staleness for each in found.trained) <= found.plan.slack
        assert 0.0 <= found.bubble <= 1.0
        assert all(0.0 <= share <= 1.0 for share in found.idle.values())
        assert set(found.given_up) <= {"stale", "surplus"}
        by_worker: dict[str, list[tuple[float, float]]] = {}
        for span in found.spans:
            assert span.start <= span.end <= found.ends[-1] + 1e-6
            by_worker.setdefault(span.worker, []).append((span.start, span.end))
        for spans in by_worker.values():  # no worker does two things at a time, and engines stand still for new weights
            spans.sort()
            assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(spans))


def test_all_schedules_have_as_many_workers_where_there_are_two_or_more() -> None:
    plan = plan_of(pools={"train": {"workers": 3}, "generate": {"workers": 2}})
    found = compared(plan, costs(), steps=4)
    assert [each.team.workers for each in found.outcomes] == [5, 5, 5]
    assert [(each.team.training, each.team.rollout) for each in found.splits] == [(4, 1), (3, 2), (2, 3), (1, 4)]
    assert {name: pool.workers for name, pool in found.outcomes[0].plan.pools.items()} == {"cpu": 1, "train": 5}
    assert {name: pool.workers for name, pool in found.splits[0].plan.pools.items()} == {
        "cpu": 1, "train": 4, "generate": 1,
    }  # fmt: skip


def test_the_split_of_the_pipeline_stands_for_separate_async_and_else_the_fastest() -> None:
    pools = {"train": {"workers": 1}, "generate": {"workers": 3}}
    slow = costs(train=4.0)
    own = compared(plan_of(pools=pools, schedule={"mode": "separate_async"}), slow, steps=6)
    assert (own.outcomes[-1].team.training, own.outcomes[-1].team.rollout) == (1, 3)
    free = compared(plan_of(pools=pools), slow, steps=6)
    assert (free.outcomes[-1].team.training, free.outcomes[-1].team.rollout) == (3, 1)


def test_one_worker_can_only_be_split_into_two() -> None:
    _, team = team_of(plan_of())
    assert team.splits() == [Team("train", "generate", 1, 1, shared=False)]


def test_many_workers_are_split_in_a_few_ways_evenly_and_in_whole_copies() -> None:
    team = Team("train", "generate", 64, 64, shared=True, multiple=4)
    tried = [each.rollout for each in team.splits()]
    assert (tried[0], tried[-1], len(tried)) == (4, 60, 9)
    assert all(rollout % 4 == 0 for rollout in tried)
    assert all(each.training + each.rollout == 64 for each in team.splits())


def test_rollouts_in_the_pool_that_trains_get_one_of_their_own() -> None:
    nodes = document()["nodes"]
    nodes["rollout"]["pool"] = "train"
    plan, team = team_of(plan_of(nodes=nodes, pools={"train": {"workers": 2}}))
    assert (team.trainers, team.engines, team.shared) == ("train", "generate", True)
    apart = under(plan, team.split(1), SeparateAsyncSchedule(), 3)
    assert {name: pool.workers for name, pool in apart.pools.items()} == {"cpu": 1, "generate": 1, "train": 1}
    assert len(simulate(apart, team.split(1), costs()).ends) == 3


def test_a_schedule_keeps_what_the_pipeline_says_of_it() -> None:
    own = {"mode": "separate_async", "max_staleness": 3, "warmup_batches": 2, "updates_per_sync": 2}
    plan = plan_of(schedule=own, pools={"train": {"workers": 1}, "generate": {"workers": 1}})
    sync, colocated, apart = schedules(plan)
    assert sync.model_dump() == {"mode": "sync"}
    assert colocated.model_dump(include={"max_staleness", "warmup_batches"}) == {
        "max_staleness": 3,
        "warmup_batches": 2,
    }
    assert apart is plan.document.schedule


def test_no_schedule_is_shown_whose_samples_are_older_than_a_node_can_use() -> None:
    default = Path(__file__).parents[3] / "pipelines" / "grpo_sync.yaml"
    for allowed, slack in ((0, 0), (1, 1), (3, 1)):
        plan = flowrl.load(default, sets=[f"nodes.actor_update.uncorrected_staleness={allowed}"]).plan()
        _, *ahead = schedules(plan)
        assert [getattr(schedule, "max_staleness", None) for schedule in ahead] == [slack, slack]


def test_of_two_rollouts_what_is_trained_counts_whichever_ends_last() -> None:
    """`remax` trains on the sampled responses; the greedy ones are three times as long here, and of no row that is."""
    remax = Path(__file__).parents[3] / "pipelines" / "remax.yaml"
    plan = flowrl.load(remax).plan()
    base, team = team_of(plan)
    little = dict.fromkeys(plan.graph.nodes, 0.01)
    decoding = {
        "rollout": Decoding(Observed((Response(100.0, 2.0),)), 0.01),
        "greedy": Decoding(Observed((Response(300.0, 1.0),)), 0.01),
    }
    given = Costs("made up", little, decoding, little, 0.0)
    for schedule, members in zip(schedules(base), (team.joined(), team.joined(), team.splits()[0]), strict=True):
        found = simulate(under(base, members, schedule, 4), members, given)
        assert {each.tokens for each in found.trained} == {200.0}
        assert len(found.trained) == 4 * plan.document.batch.prompts


def test_what_trains_on_nothing_of_its_own_cannot_be_compared() -> None:
    nodes = {name: node for name, node in document()["nodes"].items() if name not in ("update", "sync")}
    with pytest.raises(NotComparable, match="no model is trained on what it generates"):
        team_of(plan_of(nodes=nodes))
