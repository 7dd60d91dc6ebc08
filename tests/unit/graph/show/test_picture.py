"""Pictures as values: what is drawn once, and what unrolling makes of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stub_nodes import document

from flowrl import Pipeline
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.graph.show.picture import Arrow, picture

settings.register_profile("pictures", settings.get_profile("flowrl"), max_examples=40)
SLOW = settings.get_profile("pictures")

TRAINED = {
    "rollout": {"use": "Rollout", "model": "policy", "pool": "generate"},
    "score": {"use": "Judge"},
    "old": {"use": "Read", "model": "policy", "pool": "train"},
    "update": {"use": "Update", "model": "policy", "pool": "train"},
    "sync": {"use": "Sync", "model": "policy"},
}
SCHEDULES = [
    {"mode": "sync"},
    {"mode": "colocate_async", "max_staleness": 0},
    {"mode": "colocate_async", "max_staleness": 3},
    {"mode": "separate_async", "max_staleness": 1},
    {"mode": "separate_async", "max_staleness": 2, "updates_per_sync": 2},
]


def made(nodes: dict[str, Any], schedule: dict[str, Any]) -> Plan:
    pools = {"train": {}, "generate": {} if schedule["mode"] == "separate_async" else {"shares": "train"}}
    models = {"policy": {"path": "x", "trainable": True}}
    return Pipeline(document(nodes, models=models, pools=pools, schedule=schedule)).plan()


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A trained model, and beside it values that follow from each other, from the data, and from the responses."""
    nodes: dict[str, Any] = {}
    for number in range(draw(st.integers(0, 5))):
        sources = [f"v{i}" for i in draw(st.sets(st.integers(0, number - 1), max_size=3))] if number else []
        sources += ["score"] * draw(st.booleans())
        reads = {"reads": {"inputs": sources}} if sources else {}
        nodes[f"n{number}"] = {"use": "Mix" if sources else "Source", "writes": {"value": f"v{number}"}} | reads
    return made(TRAINED | nodes, draw(st.sampled_from(SCHEDULES)))


def ends(arrow: Arrow) -> tuple[str, str]:
    return arrow.source.partition("@")[0], arrow.target.partition("@")[0]


def steps(arrow: Arrow) -> tuple[int, int]:
    return int(arrow.source.partition("@")[2]), int(arrow.target.partition("@")[2])


@SLOW
@given(plans())
def test_every_node_and_every_edge_is_drawn_once(plan: Plan) -> None:
    shown = picture(plan)
    assert Counter(box.key for box in shown.boxes) == Counter([DATA, *plan.graph.nodes])
    drawn = Counter((a.source, a.target, a.kind, label, a.distance) for a in shown.arrows for label in a.labels)
    assert drawn == Counter((e.source, e.target, e.kind, e.label, e.distance) for e in plan.graph.edges)
    assert len({(a.source, a.target, a.kind, a.distance) for a in shown.arrows}) == len(shown.arrows)
    assert shown.beyond == () == shown.notes


@SLOW
@given(plans(), st.integers(1, 6))
def test_unrolling_repeats_each_step_and_carries_weights_as_far_as_the_slack_allows(plan: Plan, num_steps: int) -> None:
    once, shown = picture(plan), picture(plan, num_steps)
    names = Counter(box.node for box in once.boxes)
    assert all(Counter(box.node for box in shown.of_step(step)) == names for step in range(1, num_steps + 1))
    within = Counter((*ends(a), a.kind, a.labels) for a in shown.arrows if not a.distance)
    assert within == {(*ends(a), a.kind, a.labels): num_steps for a in once.arrows if not a.distance}
    assert all(len(set(steps(a))) == 1 for a in shown.arrows if not a.distance)
    carried = [a for a in (*shown.arrows, *shown.beyond) if a.distance]
    assert Counter(ends(a) for a in carried) == {ends(a): num_steps for a in once.arrows if a.distance}
    for arrow in carried:
        source, target = steps(arrow)
        assert target - source == 1 + plan.slack
        assert arrow.slack == plan.slack
        assert arrow.label == f"weights of policy, slack {plan.slack}"
        assert (target > num_steps) == (arrow in shown.beyond)


@SLOW
@given(plans(), st.one_of(st.none(), st.integers(1, 3)))
def test_boxes_and_arrows_are_in_an_order_that_can_be_run(plan: Plan, unroll: int | None) -> None:
    shown = picture(plan, unroll)
    place = {box.key: number for number, box in enumerate(shown.boxes)}
    for arrow in shown.arrows:
        assert (arrow.distance and unroll is None) or place[arrow.source] < place[arrow.target]
    assert [place[arrow.source] for arrow in shown.arrows] == sorted(place[arrow.source] for arrow in shown.arrows)


def test_a_carried_arrow_leads_to_the_next_step() -> None:
    (arrow,) = (arrow for arrow in picture(made(TRAINED, SCHEDULES[0])).arrows if arrow.distance)
    assert (arrow.source, arrow.target, arrow.label) == ("sync", "rollout", "weights of policy, next step")
    (arrow,) = (arrow for arrow in picture(made(TRAINED, SCHEDULES[2])).arrows if arrow.distance)
    assert arrow.label == "weights of policy, next step, slack 3"


def test_what_leads_past_the_last_step_is_said() -> None:
    plan = made(TRAINED, SCHEDULES[0])
    assert picture(plan, 3).notes == ("to step 4: sync@3 -> rollout@4, slack 0",)
    assert [(a.source, a.target) for a in picture(plan, 3).arrows if a.distance] == [
        ("sync@1", "rollout@2"),
        ("sync@2", "rollout@3"),
    ]
    late = picture(made(TRAINED, SCHEDULES[4]), 2)
    assert late.notes == (
        "to step 4: sync@1 -> rollout@4, slack 2",
        "to step 5: sync@2 -> rollout@5, slack 2",
    )


def test_what_follows_the_rollout_runs_on_each_cut_batch() -> None:
    nodes = {**TRAINED, "early": {"use": "Label"}, "late": {"use": "Mix", "reads": {"inputs": ["score"]}}}
    for unroll in (None, 2):
        boxes = picture(made(nodes, SCHEDULES[4]), unroll).boxes
        assert {box.node: box.times for box in boxes} == {
            DATA: 1, "early": 1, "rollout": 1, "sync": 1, "score": 2, "late": 2, "old": 2, "update": 2,
        }  # fmt: skip
        assert {box.note for box in boxes} == {"", "x2 a step"}


def test_a_node_is_left_out_of_the_steps_in_which_it_does_not_run() -> None:
    plan = made({**TRAINED, "score": {"use": "Judge", "every": 3}}, SCHEDULES[0])
    shown = picture(plan, 7)
    assert [box.step for box in shown.boxes if box.node == "score"] == [3, 6]
    assert [arrow.target for arrow in shown.arrows if arrow.target.startswith("score")] == ["score@3", "score@6"]
    assert {box.note for box in picture(plan).boxes if box.node == "score"} == {"every 3 steps"}


def test_a_sync_that_does_not_run_sends_nothing() -> None:
    seldom = {name: {**TRAINED[name], "every": 2} for name in ("update", "sync")}
    shown = picture(made(TRAINED | seldom, SCHEDULES[0]), 5)
    assert [(a.source, a.target) for a in shown.arrows if a.distance] == [
        ("sync@2", "rollout@3"),
        ("sync@4", "rollout@5"),
    ]
    assert shown.beyond == ()


@pytest.mark.parametrize("unroll", [0, -1])
def test_at_least_one_step_is_drawn(unroll: int) -> None:
    with pytest.raises(ValueError, match="unroll must be at least 1"):
        picture(made(TRAINED, SCHEDULES[0]), unroll)


def test_a_validation_says_when_it_runs_and_is_drawn_in_these_steps_alone() -> None:
    strict = {"use": "Judge", "writes": {"score": "strict"}}
    watch = {"use": "evaluate.accuracy", "every": 3, "before_training": True, "at_end": True}
    nodes = {**TRAINED, "strict": strict, "watch": {**watch, "reads": {"reward": "strict"}}}
    document_ = document(
        nodes, models={"policy": {"path": "x", "trainable": True}}, pools={"train": {}, "generate": {}}
    )
    document_["data"]["val"] = document_["data"]["train"]
    plan = Pipeline({**document_, "run": {"steps": 5}}).plan()
    notes = {box.node: box.note for box in picture(plan).boxes if box.note}
    assert notes == {"watch": "every 3 steps, before training and at the end, on val", "strict": "in validation only"}
    shown = picture(plan, 5)
    assert [box.key for box in shown.boxes if box.note] == ["strict@3", "watch@3", "strict@5", "watch@5"]
    late = {
        (arrow.source, arrow.target) for arrow in shown.arrows if arrow.kind == "weights" and arrow.source == "sync@3"
    }
    assert late == {("sync@3", "watch@3"), ("sync@3", "rollout@4")}
