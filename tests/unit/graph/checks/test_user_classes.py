"""Classes of users that the checks ask about their settings: whatever they answer, there is a problem and no crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from stub_nodes import document

from flowrl import Pipeline
from flowrl.errors import Problem

CLASSES = """
from collections.abc import Iterator
from typing import Any, NamedTuple
from pydantic import Field, field_validator
from flowrl import Node, Prompt, Sample, Token
from flowrl.rows import Rows

class Asks(Node):
    how: str = ""
    size: int = 0

    class Out(NamedTuple):
        asked: Sample[float]

    def needs(self) -> Any:
        answers = {"none": None, "list": ["extra"], "number": {"extra": 1}, "unknown": {"extr": True},
                   "always": {"prompt": False}, "later": {"extra": bool([False][self.size])}}
        return answers[self.how]

    def run(self, prompt: Prompt[str], extra: Sample[float] | None = None) -> Out: ...

class Cuts(Node):
    scope = "batch"
    weights = "updates"
    pure = False
    device = "accelerator"
    minibatch: int = 0

    def refuses(self, reads, num_prompts, max_staleness=0):
        return "" if num_prompts // self.minibatch else "nothing"

    def run(self, response_mask: Token[bool]) -> None: ...

class Draws(Node):
    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"
    top_p: float | None = None
    top_k: Any = None
    min_p: bool = False

    class Out(NamedTuple):
        rows: Rows
        response_mask: Token[bool]

    def run(self, prompt: Prompt[str]) -> Iterator[Out]: ...

class Kind(Node):
    size: int = "x"
    def run(self, prompt: Prompt[str]) -> None: ...

class Checked(Node):
    size: int = 1

    @field_validator("size")
    @classmethod
    def _even(cls, size: int) -> int:
        if size % 2:
            raise ValueError("must be even")
        return size

    def run(self, prompt: Prompt[str]) -> None: ...

class Nested(Node):
    sizes: dict[str, int] = {"a": 1.5}
    def run(self, prompt: Prompt[str]) -> None: ...
"""
MODELS = {"policy": {"path": "x", "trainable": True}}
ON = {"model": "policy", "pool": "gpu"}


@pytest.fixture
def use(tmp_path: Path) -> Any:
    path = tmp_path / "classes.py"
    path.write_text(CLASSES)
    return lambda name, **keys: {"use": f"{path}:{name}", **keys}


def check(nodes: dict[str, Any], **sections: Any) -> list[Problem]:
    return list(Pipeline(document(nodes, models=MODELS, pools={"gpu": {}}, **sections)).check())


@pytest.mark.parametrize(
    ("how", "fact"),
    [
        ("none", "needs() must return a dictionary of optional ports and true or false, not None"),
        ("list", "needs() must return a dictionary of optional ports and true or false, not ['extra']"),
        ("number", "needs() must return a dictionary of optional ports and true or false, not {'extra': 1}"),
        ("unknown", "needs() names 'extr', which is no optional port of run"),
        ("always", "needs() names 'prompt', which is no optional port of run"),
    ],
)
def test_needs_that_answers_something_else_is_an_error_at_the_class(use: Any, how: str, fact: str) -> None:
    (problem,) = check({"x": use("Asks", how=how)})
    assert (problem.code, problem.place.path) == ("FR014", "nodes.x.use")
    assert problem.fact == f"nodes.x: Asks raised TypeError: {fact}"


def test_needs_that_fails_for_settings_that_nobody_asked_for_is_no_problem(use: Any) -> None:
    nodes = {"x": use("Asks", how="later"), "extra": {"use": "Source", "writes": {"value": "extra"}}}
    assert {problem.code for problem in check(nodes)} == {"FR030"}


@pytest.mark.parametrize("given", [{}, {"minibatch": 0}, {"minibatch": -4}])
def test_a_mini_batch_has_a_prompt(use: Any, given: dict[str, int]) -> None:
    nodes = {
        "rollout": use("Draws", **ON),
        "update": use("Cuts", **ON, **given),
        "sync": {"use": "Sync", "model": "policy"},
    }
    (problem,) = check(nodes, batch={"prompts": 4, "group": 2})
    assert (problem.code, problem.fix) == ("FR007", "minibatch: 4")
    assert problem.place.path == "nodes.update" + ".minibatch" * bool(given)


def test_settings_of_the_sampling_that_are_no_number_are_left_to_the_engine(use: Any) -> None:
    nodes = {
        "rollout": use("Draws", **ON, top_k=[1], min_p=True),
        "update": use("Cuts", **ON, minibatch=1),
        "sync": {"use": "Sync", "model": "policy"},
    }
    (problem,) = check(nodes)
    assert (problem.code, problem.place.path) == ("FR074", "nodes.rollout.min_p")


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("Kind", "the default of 'size' is wrong: Input should be a valid integer, not 'x'"),
        ("Checked", "the default of 'size' is wrong: Value error, must be even, not 1"),
        ("Nested", "the default of 'sizes.a' is wrong: Input should be a valid integer, not 1.5"),
    ],
)
def test_a_default_that_its_own_class_refuses_is_an_error_whether_it_is_used_or_not(
    use: Any, name: str, fact: str
) -> None:
    for given in ({}, {"size": 2} if name != "Nested" else {"sizes": {}}):
        (problem,) = check({"x": use(name, **given)})
        assert problem.code == "FR014"
        assert problem.fact.endswith(f": {name}: {fact}")
