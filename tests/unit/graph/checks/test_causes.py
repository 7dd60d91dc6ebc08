"""Causes before effects, and suggestions that help: cases in which it would be easy to say too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_nodes import document

from flowrl import Pipeline
from flowrl.errors import Problem
from flowrl.graph.checks.offers import Names
from flowrl.pipeline import load


def check(nodes: dict[str, Any], **sections: Any) -> list[Problem]:
    return list(Pipeline(document(nodes, **sections)).check())


def codes(nodes: dict[str, Any], **sections: Any) -> list[str]:
    return [problem.code for problem in check(nodes, **sections) if problem.severity == "error"]


def mix(*inputs: str, to: str) -> dict[str, Any]:
    return {"use": "Mix", "reads": {"inputs": list(inputs)}, "writes": {"value": to}}


# Suggestions.


def test_a_slip_is_found_among_thousands_of_names() -> None:
    names = Names(f"reward_{number}_of_node" for number in range(5000))
    for slip in ("rewrd_4711_of_node", "reward_4711_of_nod", "reward_4711_of_ndoe", "reward_4711of_node"):
        assert "reward_4711_of_node" in names.around(slip)
        assert len(names.around(slip)) <= 80
    assert Names(["b", "a"]).around("zzz") == {"a", "b"}


def test_a_node_is_never_offered_what_follows_from_it() -> None:
    nodes = {"a": mix("reward", to="shaped"), "b": mix("shaped", to="rewards"), "c": {"use": "Source"}}
    (problem,) = check(nodes)
    assert (problem.code, problem.fix) == ("FR020", "reads: {inputs: value}")
    assert problem.notes == ("'value' (Sample[float], written by c) has the right type",)


def test_one_wrong_field_of_many_is_shown_in_the_list(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "extends: grpo_sync\nnodes:\n  reward: {writes: {reward: exact}}\n"
        "  total: {use: reward.weighted_sum, reads: {rewards: [exact, exct, exact]}}\n"
    )
    (problem,) = load(path).check()
    assert (problem.place.path, problem.place.column) == ("nodes.total.reads.rewards[1]", 62)
    assert problem.fix == "exact instead of exct"


@pytest.mark.parametrize(
    ("pipeline", "sets", "missed", "fix"),
    [
        ("ppo", ["nodes.values=null"], "values", "{use: model.values}"),
        ("ppo", ["nodes.advantage.use=advantage.grpo"], "returns", "{use: advantage.gae}"),
        ("ppo", ["nodes.ref_logprob=null"], "ref_log_probs", "{use: model.logprob, writes: {log_"),
        ("grpo", ["nodes.ref_logprob=null"], "ref_log_probs", "writes: {log_probs: ref_log_probs}}"),
        ("remax", ["nodes.baseline=null"], "baseline", "{use: reward.baseline}"),
        ("grpo", ["nodes.reward=null"], "reward", "{use: reward.exact_match} or {use: reward.function}"),
    ],
)
def test_where_a_node_is_missing_one_that_writes_the_field_is_offered_and_not_whatever_has_its_type(
    pipeline: str, sets: list[str], missed: str, fix: str
) -> None:
    problem = load(pipeline, sets).check()[0]
    assert problem.code == "FR020" and f"reads '{missed}'" in problem.fact
    assert fix in problem.fix and "reads:" not in problem.fix


def test_a_field_nearly_named_like_an_optional_port_is_told() -> None:
    problem, *_ = load("grpo_sync", ["nodes.old_logprob.writes={log_probs: old_logprobs}"]).check()
    assert problem.code == "FR026"
    assert problem.notes == ("nodes.old_logprob writes 'old_logprobs'; did you mean 'old_log_probs'?",)


def test_a_field_that_the_user_names_must_be_there_also_on_an_optional_port() -> None:
    (problem,) = load("grpo_sync", ["nodes.actor_update.reads={rollout_log_probs: rollot_log_probs}"]).check()
    assert (problem.code, problem.place.path) == ("FR020", "nodes.actor_update.reads.rollout_log_probs")
    assert problem.fix == "reads: {rollout_log_probs: rollout_log_probs}"
    sets = ["nodes.actor_update.reads={old_log_probs: old_logprobs}", "nodes.actor_update.reads.ref_log_probs=nobody"]
    assert [problem.code for problem in load("grpo_sync", sets).check()] == ["FR020", "FR020"]
    off = ["nodes.actor_update.kl_coef=0.0", "nodes.actor_update.reads={ref_log_probs: nobody}"]
    assert {problem.code for problem in load("grpo_sync", off).check()} == {"FR030"}


def test_a_misspelt_input_says_nothing_about_the_fields_that_are_read() -> None:
    sets = ["nodes.actor_update.reads={old_log_prob: anchor}", "nodes.old_logprob.writes={log_probs: anchor}"]
    assert [problem.code for problem in load("grpo_sync", sets).check()] == ["FR013"]


def test_a_node_that_reads_what_it_writes_is_offered_what_others_write() -> None:
    source, loop = {"use": "Source", "writes": {"value": "raw"}}, {"use": "Optional"}
    (problem,) = check({"a": source, "b": loop})
    assert (problem.code, problem.fix) == ("FR040", "reads: {value: raw}")
    assert problem.notes == ("'raw' (Sample[float], written by a) has the right type",)
    (problem,) = check({"a": source, "m": mix("raw", "y", to="y")})
    assert (problem.code, problem.fix) == ("FR040", "raw instead of y")
    (problem,) = check({"m": mix("y", to="y")})
    assert (problem.code, problem.fix) == ("FR040", "let m read a field that another node writes")


def test_the_fix_of_one_field_of_many_keeps_the_others() -> None:
    nodes = {"a": {"use": "Source"}, "l": {"use": "Label"}, "m": mix("value", "label", to="y")}
    (problem,) = check(nodes)
    assert (problem.code, problem.fix) == ("FR022", "a field of type Sample[float] instead of label")


def test_a_second_writer_is_one_problem_with_names_that_are_free() -> None:
    nodes = {"a": {"use": "Rollout", "model": "policy", "pool": "gpu"}}
    nodes |= {"b": nodes["a"], "c": {"use": "Label", "writes": {"label": "response_b"}}}
    sections = {"models": {"policy": {"path": "x"}}, "pools": {"gpu": {}}}
    (problem,) = check(nodes, **sections)
    assert problem.fact == "nodes.b writes 'response_mask', 'response', which nodes.a writes already"
    assert (problem.code, problem.place.path) == ("FR021", "nodes.b")
    assert problem.fix == "writes: {response_mask: response_mask_b, response: response_2}"


@pytest.mark.parametrize(
    ("node", "written", "fix"),
    [
        ("b", "value", "writes: {value: value_b}"),
        ("b", "x", "writes: {value: value_b}"),
        ("value", "value", "writes: {value: value_2}"),
    ],
)
def test_an_output_that_the_user_has_named_is_refused_where_he_has_named_it(node: str, written: str, fix: str) -> None:
    first = {"a": {"use": "Source", "writes": {"value": written}}, "other": {"use": "Source"}}
    first = first if written != "value" else {"a": first["a"]}
    problem, *more = (p for p in check({**first, node: {"use": "Source", "writes": {"value": written}}}) if p)
    assert (problem.code, problem.place.path, more) == ("FR021", f"nodes.{node}.writes.value", [])
    assert problem.fix == fix.replace("value_b", "x_b" if written == "x" else "value_b")


def test_an_output_led_astray_is_led_back_to_who_reads_it() -> None:
    (problem,) = load("grpo_sync", ["nodes.reward.writes={reward: prompt}"]).check()
    assert (problem.code, problem.place.path) == ("FR021", "nodes.reward.writes.reward")
    assert problem.fix == "writes: {reward: reward}"


def test_a_node_that_writes_one_field_twice_is_told_at_the_second_output() -> None:
    nodes = {"n": {"use": "NotFinite", "writes": {"limit": "z", "weights_of_tokens": "z"}}}
    problem = next(problem for problem in check(nodes) if problem.code == "FR021")
    assert (problem.place.path, problem.fix) == ("nodes.n.writes.limit", "writes: {limit: limit}")


# One cause, one error.


def test_a_sync_with_an_unknown_pool_is_told_that_it_takes_none() -> None:
    (problem,) = load("grpo_sync", ["nodes.weight_sync.pool=trian"]).check()
    assert problem.code == "FR053"


def test_a_rollout_without_a_pool_is_one_error_under_every_schedule() -> None:
    for mode in ("sync", "colocate_async"):
        found = load("grpo_sync", ["nodes.rollout.pool=null", f"schedule={{mode: {mode}}}"]).check()
        assert [problem.code for problem in found if problem.severity == "error"] == ["FR050"], mode


def test_a_wrong_gate_is_no_cycle() -> None:
    nodes = {
        "rollout": {"use": "Rollout", "model": "policy", "pool": "gpu"},
        "old": {"use": "Read", "model": "policy", "pool": "gpu"},
        "update": {"use": "Writer", "model": "policy", "pool": "gpu"},
        "gate": {"use": "LateGate", "gate": "keep"},
        "sync": {"use": "Sync", "model": "policy"},
    }
    sections = {"models": {"policy": {"path": "x", "trainable": True}}, "pools": {"gpu": {}}}
    assert codes(nodes, **sections) == ["FR028"]


def test_fields_that_are_written_too_seldom_are_one_error_for_each_reader() -> None:
    found = [p for p in load("grpo_sync", ["nodes.rollout.every=2"]).check() if p.code == "FR029"]
    assert len(found) == len({problem.place.path for problem in found}) == 5
    (update,) = (problem.fact for problem in found if problem.place.path == "nodes.actor_update")
    assert update == (
        "nodes.actor_update reads 'policy_version', 'prompt_ids', 'response_ids', 'rollout_log_probs', 'temperature' "
        "in every step, but nodes.rollout writes them in every 2nd step"
    )


@pytest.mark.parametrize(("path", "known"), [("me/arith-tiny", True), ("arith-tinny", False)])
def test_a_hub_id_is_no_slip_of_a_shipped_name(path: str, known: bool) -> None:
    found = load("grpo_sync", [f"params.base={path}"]).check()
    assert [problem.code for problem in found if problem.severity == "error"] == ["FR010"] * (not known)


# Batches that cannot be cut.


def cut(updates: int, minibatch: int, *more: str) -> list[Problem]:
    sets = [f"schedule={{mode: separate_async, updates_per_sync: {updates}}}", "pools.generate={shares: null}"]
    sets.append(f"nodes.actor_update.minibatch={minibatch}")
    return [p for p in load("grpo_sync", [*sets, *more]).check() if p.severity == "error"]


def test_two_batches_between_two_syncs_are_two_steps_of_the_optimizer() -> None:
    assert cut(1, 32, "nodes.old_logprob=null", "schedule.max_staleness=0") == []
    (problem,) = cut(2, 16, "nodes.old_logprob=null", "schedule.max_staleness=0")
    assert problem.code == "FR026"
    assert "2 optimizer steps in one cycle need old_log_probs" in problem.fact


@pytest.mark.parametrize(
    ("updates", "minibatch", "fix"),
    [
        (3, 16, "updates_per_sync: 2, or batch.prompts: 48"),
        (64, 16, "updates_per_sync: 2, or batch.prompts: 1024"),
        (3, 10, "batch.prompts: 60"),
    ],
)
def test_batches_that_do_not_divide_the_prompts_are_one_error_of_the_schedule(
    updates: int, minibatch: int, fix: str
) -> None:
    (problem,) = cut(updates, minibatch, "nodes.old_logprob=null")
    assert (problem.code, problem.place.path, problem.fix) == ("FR060", "schedule.updates_per_sync", fix)
    ways = {"updates_per_sync": "schedule.updates_per_sync", "batch.prompts": "batch.prompts"}
    for way in fix.split(", or "):
        key, _, number = way.partition(": ")
        assert cut(updates, minibatch, f"{ways[key]}={number}") == []


@pytest.mark.parametrize("prompts", [8, 12, 30])
@pytest.mark.parametrize("minibatch", [1, 2, 5, 7])
@pytest.mark.parametrize("workers", [1, 5, 9, 40])
def test_the_first_fix_of_a_mini_batch_is_enough(prompts: int, minibatch: int, workers: int) -> None:
    sets = [f"batch={{prompts: {prompts}, group: 1}}", f"pools.train.workers={workers}"]
    made = load("grpo_sync", [*sets, f"nodes.actor_update.minibatch={minibatch}"])
    errors = [problem for problem in made.check() if problem.severity == "error"]
    if errors:
        (problem,) = errors
        key, _, number = problem.fix.partition(", ")[0].partition(": ")
        fixed = [*sets, f"nodes.actor_update.minibatch={minibatch}"]
        fixed.append(f"{key.replace('minibatch', 'nodes.actor_update.minibatch')}={number}")
        left = [p.code for p in load("grpo_sync", fixed).check() if p.severity == "error"]
        # A batch with fewer rows than workers needs two changes, of which each is one fix.
        assert left == (["FR061"] if workers > prompts and problem.code == "FR060" else [])


def test_a_node_whose_writes_are_refused_may_write_anything() -> None:
    source = {"use": "Source", "writes": {"value": "x"}}
    assert codes({"a": source, "b": mix("x", to="y")}) == []
    for wrong in ({"writes": 3}, {"writes": {"value": 3}}, {"writes": {"valu": "x"}}, {"write": {"value": "x"}}):
        node = {key: value for key, value in source.items() if key != "writes"} | wrong
        assert len(codes({"a": node, "b": mix("x", to="y")})) == 1, wrong


def test_a_node_whose_reads_are_refused_may_read_anything() -> None:
    for wrong in (3, {"inputs": 3}, {"inputs": ["value", 3]}):
        assert codes({"a": {"use": "Source"}, "b": {"use": "Mix", "reads": wrong, "writes": {"value": "y"}}}) == [
            "FR006"
        ]


def test_a_wrong_setting_asks_for_no_field() -> None:
    nodes = {"a": {"use": "Source"}, "b": {"use": "Optional", "writes": {"value": "y"}, "eager": "yes"}}
    assert codes(nodes) == ["FR006"]


def test_pools_that_share_in_a_circle_are_one_error() -> None:
    pools = {name: {"shares": other} for name, other in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "a"))}
    (problem,) = (p for p in check({"x": {"use": "Source", "pool": "d"}}, pools=pools) if p.code == "FR012")
    assert problem.fact == "pools.a shares workers in a circle: a shares b shares c shares a"


def test_a_pool_that_shares_with_an_unknown_one_is_the_only_error() -> None:
    pools = {"a": {"shares": "b"}, "b": {"shares": "nobody"}}
    assert codes({"x": {"use": "Source", "pool": "a"}}, pools=pools) == ["FR012"]
    assert codes({"x": {"use": "Source", "pool": "a"}}, pools={"a": {"shares": "b"}, "b": 3}) == ["FR006"]


@pytest.mark.parametrize("sets", [["params=null"], ["params.base=null"], ["params={}", "params.base=null"]])
def test_a_param_that_is_null_is_left_out(sets: list[str]) -> None:
    assert {problem.code for problem in load("grpo_sync", sets).check()} == {"FR015"}


def test_a_tag_that_changes_a_value_is_refused_even_if_it_is_a_plain_one(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("extends: grpo_sync\nrun: {seed: !!str 3}\n")
    (problem,) = load(path).check()
    assert (problem.code, problem.fix) == ("FR004", 'write "3"')


# What only an unread node needs.


def test_only_what_no_other_node_needs_is_said_to_be_wasted_with_it() -> None:
    nodes = {
        "shared": {"use": "Source", "writes": {"value": "s"}},
        "own": mix("s", to="o"),
        "first": mix("o", "s", to="f"),
        "second": mix("s", to="t"),
        "rollout": {"use": "Rollout", "model": "policy", "pool": "gpu"},
        "update": {"use": "Update", "model": "policy", "pool": "gpu"},
        "sync": {"use": "Sync", "model": "policy"},
    }
    sections = {"models": {"policy": {"path": "x", "trainable": True}}, "pools": {"gpu": {}}}
    notes = {problem.place.path: problem.notes for problem in check(nodes, **sections)}
    assert notes == {"nodes.first": ("only it needs nodes.own",), "nodes.second": ()}


def test_a_gate_is_not_wasted() -> None:
    nodes = {
        "rollout": {"use": "Rollout", "model": "policy", "pool": "gpu"},
        "judge": {"use": "Judge"},
        "gate": {"use": "Gate", "gate": "keep"},
        "update": {"use": "Update", "model": "policy", "pool": "gpu"},
        "sync": {"use": "Sync", "model": "policy"},
    }
    sections = {"models": {"policy": {"path": "x", "trainable": True}}, "pools": {"gpu": {}}}
    assert [problem.code for problem in check(nodes, **sections)] == []


# A class of the user's that fails when it is asked.

BAD = """
from typing import NamedTuple
from pydantic import model_validator
from flowrl import Node, Prompt, Sample

class Bad(Node):
    how: str = ""

    class Out(NamedTuple):
        bad: Sample[float]

    @model_validator(mode="after")
    def _valid(self):
        return self.fail("valid") or self

    def needs(self):
        return self.fail("needs") or {}

    def refuses(self, reads, num_prompts, max_staleness=0):
        return self.fail("refuses") or ""

    def max_staleness(self):
        return self.fail("max_staleness") or 0

    def fail(self, how):
        if self.how == how:
            raise KeyError(how)

    def run(self, prompt: Prompt[str]) -> Out:
        raise NotImplementedError
"""


@pytest.mark.parametrize("how", ["valid", "needs", "refuses", "max_staleness"])
def test_a_class_that_fails_when_it_is_asked_is_an_error_and_no_crash(how: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD)
    nodes = {"x": {"use": f"{tmp_path}/bad.py:Bad", "how": how}}
    (problem, *_) = check(nodes, schedule={"mode": "colocate_async", "max_staleness": 0})
    assert (problem.code, problem.place.path) == ("FR014", "nodes.x.use")
    assert problem.fact == f"nodes.x: Bad raised KeyError: '{how}'"
