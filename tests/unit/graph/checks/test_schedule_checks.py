"""Checks of gates, of how often nodes run, of schedules and of their capacity."""

from __future__ import annotations

from typing import Any

import pytest
from stub_nodes import document

from flowrl import Pipeline
from flowrl.errors import Problem

MODELS = {"policy": {"path": "x", "trainable": True}}
ON = {"model": "policy", "pool": "gpu"}
GOOD: dict[str, Any] = {
    "rollout": {"use": "Rollout", "model": "policy", "pool": "engines"},
    "judge": {"use": "Judge"},
    "fresh": {"use": "Fresh", "limit": 9},
    "old": {"use": "Read", **ON},
    "update": {"use": "Update", **ON},
    "sync": {"use": "Sync", "model": "policy"},
}
APART = {"gpu": {}, "engines": {}}
TOGETHER = {"gpu": {}, "engines": {"shares": "gpu"}}


def found(nodes: dict[str, Any], *, ignore: tuple[str, ...] = ("FR030", "FR079"), **sections: Any) -> list[Problem]:
    """Problems of the pipeline without those that other tests are about."""
    made = document(nodes, **{"models": MODELS, "pools": APART} | sections)
    return [problem for problem in Pipeline(made).check() if problem.code not in ignore]


def separate(**keys: Any) -> dict[str, Any]:
    return {"mode": "separate_async", **keys}


@pytest.mark.parametrize(("mode", "pools"), [("separate_async", APART), ("colocate_async", TOGETHER), ("sync", APART)])
def test_the_pools_that_a_schedule_wants_are_right(mode: str, pools: dict[str, Any]) -> None:
    assert found(GOOD, schedule={"mode": mode}, pools=pools) == []


def test_fr071_separate_async_on_shared_workers_and_colocate_async_on_separate_ones() -> None:
    (problem,) = found(GOOD, schedule=separate(), pools=TOGETHER)
    assert (problem.code, problem.place.path) == ("FR071", "nodes.rollout.pool")
    assert problem.fix == "pools.engines: {shares: null, workers: 1}"
    (problem,) = found(GOOD, schedule={"mode": "colocate_async"})
    assert (problem.code, problem.fix) == ("FR071", "pools.engines: {shares: gpu}, or mode: separate_async")


def test_the_fix_of_fr071_clears_what_a_pool_that_shares_may_not_have() -> None:
    engines = {"workers": 2, "memory_per_worker": 80.0}
    (problem,) = found(GOOD, schedule={"mode": "colocate_async"}, pools={"gpu": {}, "engines": engines})
    assert problem.fix == (
        "pools.engines: {shares: gpu, memory_per_worker: null, workers: null}, or mode: separate_async"
    )


def test_fr070_a_node_that_is_right_for_fresh_samples_only() -> None:
    nodes = {**GOOD, "fresh": {"use": "Fresh", "limit": 1}}
    (problem,) = found(nodes, schedule=separate(max_staleness=3))
    assert (problem.code, problem.place.path, problem.fix) == ("FR070", "schedule.max_staleness", "max_staleness: 1")
    assert "nodes.fresh (stub_nodes:Fresh) is right for samples up to 1 version old" in problem.fact
    assert found(nodes, schedule=separate(max_staleness=1)) == []
    assert found(nodes) == []


UPDATE = {"use": "update.policy", **ON, "minibatch": 4, "reads": {"loss_mask": "response_mask"}}
OLD = {"use": "model.logprob", **ON, "writes": {"log_probs": "old_log_probs"}}
CORRECTION = {"use": "filter.rollout_correction"}


def off_policy(max_staleness: int, **nodes: Any) -> list[Problem]:
    """Problems of a real update on samples of this age."""
    given = {
        "rollout": {"use": "rollout.generate", "model": "policy", "pool": "engines", "max_tokens": 4},
        "mask": {"use": "NotFinite", "writes": {"weights_of_tokens": "advantages", "limit": "unused"}},
        "old": OLD, "update": UPDATE, "sync": GOOD["sync"],
    }  # fmt: skip
    kept = {name: node for name, node in {**given, **nodes}.items() if node is not None}
    return found(kept, schedule=separate(max_staleness=max_staleness))


def test_fr070_an_update_on_old_samples_without_a_correction() -> None:
    (problem,) = off_policy(3)
    assert (problem.code, problem.place.path) == ("FR070", "schedule.max_staleness")
    assert problem.fact == (
        "nodes.update (update.policy) is right for samples up to 2 versions old, but this schedule hands it samples "
        "up to 3 old"
    )
    assert problem.fix == (
        "max_staleness: 2, or add {use: filter.rollout_correction}, which writes 'importance_weights'"
    )
    assert off_policy(2) == []
    assert off_policy(9, correction=CORRECTION) == []
    assert off_policy(3, update={**UPDATE, "uncorrected_staleness": 3}) == []


def test_fr070_a_correction_that_the_update_does_not_read_is_none() -> None:
    elsewhere = {**CORRECTION, "writes": {"importance_weights": "ratio", "corrected_mask": "unread"}}
    (problem,) = off_policy(3, correction=elsewhere)
    assert problem.code == "FR070"
    assert off_policy(3, correction=elsewhere, update={**UPDATE, "reads": {
        "loss_mask": "response_mask", "importance_weights": "ratio"}}) == []  # fmt: skip


def test_fr026_a_correction_of_nothing_or_done_twice() -> None:
    same = {**CORRECTION, "reads": {"old_log_probs": "rollout_log_probs"}}
    (problem,) = off_policy(3, correction=same)
    assert (problem.code, problem.place.path) == ("FR026", "nodes.correction")
    assert "are both read from 'rollout_log_probs', so nothing is corrected" in problem.fact
    on_engine = {**UPDATE, "reads": {"loss_mask": "response_mask", "old_log_probs": "rollout_log_probs"}}
    (problem,) = off_policy(3, correction=CORRECTION, update=on_engine)
    assert (problem.code, problem.place.path) == ("FR026", "nodes.update")
    assert "importance_weights would do it twice" in problem.fact
    assert off_policy(2, update=on_engine, old=None) == []


def test_fr070_waits_where_who_corrects_may_be_what_cannot_be_loaded() -> None:
    codes = [problem.code for problem in off_policy(3, correction={"use": "filter.rollout_corection"})]
    assert codes == ["FR009"]
    misspelt = {**CORRECTION, "writes": {"importance_weight": "importance_weights"}}
    assert [problem.code for problem in off_policy(3, correction=misspelt)] == ["FR013"]


def test_fr026_stale_samples_without_the_policy_of_their_step() -> None:
    update = {"use": "update.policy", **ON, "minibatch": 4}
    mask = {"use": "stub_nodes:NotFinite", "writes": {"weights_of_tokens": "advantages", "limit": "temperature"}}
    nodes = {
        "rollout": {"use": "rollout.generate", "model": "policy", "pool": "engines", "max_tokens": 4},
        "mask": {**mask, "writes": {"weights_of_tokens": "advantages", "limit": "unused"}},
        "update": {**update, "reads": {"loss_mask": "response_mask"}},
        "sync": GOOD["sync"],
    }
    assert found(nodes) == []
    (problem,) = found(nodes, schedule=separate(max_staleness=2))
    assert (problem.code, "samples up to 2 versions old need old_log_probs" in problem.fact) == ("FR026", True)


@pytest.mark.parametrize("key", ["max_staleness: 1", "stale: wait", "updates_per_sync: 2", "max_in_flight: 8"])
def test_fr072_a_key_of_another_schedule(key: str) -> None:
    name, value = key.split(": ")
    made = document(GOOD, models=MODELS, pools=APART, schedule={"mode": "sync"})
    pipeline = Pipeline(made, sets=[f"schedule.{name}={value}"])
    (problem,) = [problem for problem in pipeline.check() if problem.severity == "error"]
    assert (problem.code, problem.place.file) == ("FR072", "--set")
    assert problem.fact.startswith(f"the chosen schedule does not use '{name}', which belongs in a schedule of mode ")


@pytest.mark.parametrize(
    ("keys", "fact", "fix"),
    [
        ({"stale": "wait", "max_staleness": 0}, "stale has no effect", "remove `stale:`"),
        ({"warmup_batches": 3, "max_staleness": 1}, "warmup_batches has no effect", "warmup_batches: 1"),
        ({"warmup_batches": 1, "max_in_flight": 4}, "warmup_batches has no effect", "remove one of the two"),
    ],
)
def test_fr072_a_setting_without_effect_is_a_warning(keys: dict[str, Any], fact: str, fix: str) -> None:
    (problem,) = found(GOOD, schedule=separate(**keys))
    assert (problem.code, problem.severity, problem.fix) == ("FR072", "warning", fix)
    assert problem.fact.startswith(f"schedule.{fact}")


@pytest.mark.parametrize("updates", [1, 2])
def test_fr073_prompts_in_flight_that_never_fill_a_step(updates: int) -> None:
    (problem,) = found(GOOD, schedule=separate(max_in_flight=3, updates_per_sync=updates))
    assert (problem.code, problem.place.path, problem.fix) == (
        "FR073",
        "schedule.max_in_flight",
        "max_in_flight: 4 or more",
    )
    assert problem.fact == "3 prompts in flight can never fill a step of 4"
    assert problem.notes == (
        "after 3 groups have settled, no prompt is admitted before they are trained and synced, and that waits for 1 "
        "more",
    )  # fmt: skip
    assert found(GOOD, schedule=separate(max_in_flight=4, updates_per_sync=updates)) == []


@pytest.mark.parametrize(("stale", "fate"), [("drop", "always dropped"), ("wait", "waited for without end")])
def test_fr073_prompts_in_flight_beyond_the_bound_on_staleness(stale: str, fate: str) -> None:
    assert found(GOOD, schedule=separate(max_in_flight=8, max_staleness=1, stale=stale)) == []
    (problem,) = found(GOOD, schedule=separate(max_in_flight=9, max_staleness=1, stale=stale))
    assert problem.code == "FR073"
    assert f"the last 1 of them would be {fate}" in problem.fact
    assert problem.fix == "max_in_flight: 8 or less, or max_staleness: 2"


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"repetition_penalty": 1.1}])
def test_fr074_training_rollouts_from_another_distribution_are_warned_of(settings: dict[str, Any]) -> None:
    rollout = {**GOOD["rollout"], "use": "Nucleus", **settings}
    (problem,) = found({**GOOD, "rollout": rollout})
    assert (problem.code, problem.severity, problem.place.path) == (
        "FR074",
        "warning",
        f"nodes.rollout.{next(iter(settings))}",
    )
    alone = {"rollout": {**rollout, "model": "frozen"}, "judge": GOOD["judge"]}
    assert found(alone, models={"frozen": {"path": "x"}}, pools={"engines": {}}) == []


GATE = {"use": "Gate", "gate": "keep"}


def test_a_gate_holds_back_whatever_reads_what_its_ancestors_write() -> None:
    plan = Pipeline(document({**GOOD, "informative": GATE}, models=MODELS, pools=APART)).plan()
    gated = {edge.target for edge in plan.graph.edges if edge.kind == "gate"}
    assert gated == {"fresh", "old", "update"}
    assert all(
        edge.label == "keep" and edge.source == "informative" for edge in plan.graph.edges if edge.kind == "gate"
    )
    place = plan.graph.order.index
    assert place("rollout") < place("judge") < place("informative") < min(place("fresh"), place("old"))


@pytest.mark.parametrize(
    ("gate", "fact", "fix"),
    [
        ({**GATE, "gate": "kept"}, "the gate is 'kept', which the node does not write", "gate: keep"),
        (
            {**GATE, "gate": "score_again"},
            "the gate 'score_again' is Sample[float]; it must be Prompt[bool]",
            "gate: a field",
        ),
        (
            {**GATE, "reads": {"score": "constant"}},
            "nothing that it depends on generates: running it again would keep the same groups",
            "let it read a field that follows from a rollout",
        ),
    ],
)  # fmt: skip
def test_fr028_a_gate_that_cannot_work(gate: dict[str, Any], fact: str, fix: str) -> None:
    constant = {"use": "Source", "writes": {"value": "constant"}}
    (problem,) = found({**GOOD, "constant": constant, "informative": gate})
    assert (problem.code, problem.place.path) == ("FR028", "nodes.informative.gate")
    assert problem.fact.startswith(f"nodes.informative: {fact}")
    assert problem.fix.startswith(fix)


def test_fr028_two_gates_are_one_too_many() -> None:
    other = {**GATE, "writes": {"keep": "keep_too", "score_again": "again"}, "gate": "keep_too"}
    (problem,) = found({**GOOD, "informative": GATE, "other": other})
    assert (problem.code, problem.fix) == ("FR028", "remove one `gate:`")


def test_fr028_a_gate_after_an_update_would_train_twice() -> None:
    update = {**GOOD["update"], "use": "Writer"}
    (problem,) = found({**GOOD, "update": update, "informative": {"use": "LateGate", "gate": "keep"}})
    assert problem.fact == "nodes.informative: it depends on nodes.update, which must not run twice in a step"
    assert (problem.code, problem.fix) == ("FR028", "let informative read only what comes before update")


def test_fr029_a_reader_that_runs_more_often_than_its_writer() -> None:
    nodes = {**GOOD, "judge": {"use": "Judge", "every": 2}}
    (problem,) = found(nodes)
    assert (problem.code, problem.place.path) == ("FR029", "nodes.fresh")
    assert problem.fact == "nodes.fresh reads 'score' in every step, but nodes.judge writes it in every 2nd step"
    assert found({**nodes, "fresh": {**GOOD["fresh"], "every": 4}}) == []
    assert [p.code for p in found({**nodes, "fresh": {**GOOD["fresh"], "every": 3}})] == ["FR029"]


def test_fr029_a_sync_that_runs_less_often_than_its_update() -> None:
    (problem,) = found({**GOOD, "sync": {**GOOD["sync"], "every": 2}})
    assert (problem.code, problem.place.path, problem.fix) == ("FR029", "nodes.sync.every", "every: 1")
    assert found({**GOOD, "update": {**GOOD["update"], "every": 2}}) == []


def test_fr052_workers_that_cannot_be_spread_evenly() -> None:
    (problem,) = found(GOOD, pools={**APART, "engines": {"workers": 5, "nodes": 2}})
    assert (problem.code, problem.fix) == ("FR052", "workers: 6 (3 on each)")
    assert found(GOOD, pools={**APART, "engines": {"workers": 6, "nodes": 2}}) == []
