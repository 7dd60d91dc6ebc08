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


def test_a_field_nearly_named_like_an_optional_port_is_told() -> None:
    problem, *_ = load("grpo_sync", ["nodes.old_logprob.writes={log_probs: old_logprobs}"]).check()
    assert problem.code == "FR026"
    assert problem.notes == ("nodes.old_logprob writes 'old_logprobs'; did you mean 'old_log_probs'?",)


# One cause, one error.


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
    assert [problem.code for problem in check(nodes, **sections)] == ["FR079"]


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
