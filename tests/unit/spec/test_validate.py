"""`validate` on models of its own, as the graph uses it for the parameters of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field, model_validator

from flowrl.errors import Place, Problem
from flowrl.model import Settings
from flowrl.spec.validate import repair


class Inner(Settings):
    a: int = 1
    names: tuple[str, ...] = ()


class Left(Settings):
    type: Literal["left"]
    size: int


class Right(Settings):
    type: Literal["right"]
    width: float = 1.0


class Params(Settings):
    temperature: float = Field(default=1.0, gt=0, le=2)
    needed: int
    inner: Inner = Inner()
    side: Annotated[Left | Right, Field(discriminator="type")] = Right(type="right")
    sides: list[Left | Right] = Field(default_factory=list)
    low: int = 0
    high: int = 5
    maybe: float | None = None
    pair: tuple[int, float] = (1, 2.0)
    either: str | tuple[int, ...] = "x"

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low must be below high")
        return self


def place(path: Sequence[str | int], key: bool = False) -> Place:
    return Place("key" if key else "value", path=".".join(map(str, path)))


def check(data: dict[str, Any], **options: Any) -> tuple[Params | None, list[Problem]]:
    params, problems, _ = repair(Params, data, place, ("nodes", "n"), **options)
    return params, problems


def test_right_data_gives_an_instance() -> None:
    params, problems = check({"needed": 3, "temperature": 1, "pair": [3, 4], "inner": {"names": ["x", "y"]}})
    assert problems == []
    assert params is not None
    assert params.temperature == 1.0
    assert params.pair == (3, 4.0)
    assert params.inner.names == ("x", "y"), "a YAML list is a tuple where one is asked for"
    assert check({"needed": 1, "either": [1, 2]})[1] == []
    assert [p.place.path for p in check({"needed": 1, "either": [1, "2"]})[1]] == ["nodes.n.either.1"]


def test_refused_values_leave_the_defaults() -> None:
    params, problems = check({"needed": 3, "temprature": 1.0, "temperature": 3, "low": True, "maybe": "3"})
    assert params == Params(needed=3)
    assert sorted((p.code, p.place.file, p.place.path) for p in problems) == [
        ("FR005", "key", "nodes.n.temprature"),
        ("FR006", "value", "nodes.n.low"),
        ("FR006", "value", "nodes.n.maybe"),
        ("FR007", "value", "nodes.n.temperature"),
    ]


def test_a_missing_parameter_is_told_at_the_key_of_the_node() -> None:
    params, problems = check({"temperature": 0})
    assert params is None
    assert [(p.code, p.place.file, p.place.path) for p in problems] == [
        ("FR007", "value", "nodes.n.temperature"),
        ("FR008", "key", "nodes.n"),
    ]


def test_keys_beside_the_model_are_near_names_too() -> None:
    _, problems = check({"needed": 1, "modle": "x"}, known=("model",))
    assert problems[0].fix == "did you mean 'model'?"
    _, problems = check({"needed": 1, "kl_coef": 1}, homes={"kl_coef": "nodes.actor_update"})
    assert problems[0].fix == "'kl_coef' belongs in nodes.actor_update"


def test_the_member_of_a_union_is_chosen_by_its_tag() -> None:
    _, problems = check({"needed": 1, "side": {"type": "left", "size": 3, "siez": 4}})
    assert [(p.place.path, p.fix) for p in problems] == [("nodes.n.side.siez", "did you mean 'size'?")]
    _, problems = check({"needed": 1, "side": {"type": "left"}})
    assert [p.fact for p in problems] == ["nodes.n.side lacks the key 'size'"]
    _, problems = check({"needed": 1, "side": {"type": "up"}})
    assert [p.fact for p in problems] == ["nodes.n.side.type must be left or right, not 'up'"]


def test_a_rule_over_several_values_is_told_once_and_not_after_a_drop() -> None:
    params, problems = check({"needed": 1, "low": 6})
    assert params is None
    assert [(p.code, p.place.path) for p in problems] == [("FR007", "nodes.n")]
    _, problems = check({"needed": 1, "low": 6, "strange": 9})
    assert sorted(p.place.path for p in problems) == ["nodes.n", "nodes.n.strange"], "unknown keys hide nothing"
    _, problems = check({"needed": 1, "low": 6, "hgih": 9})
    assert [p.place.path for p in problems] == ["nodes.n.hgih"], "unless one stands for the key that is missing"
    _, problems = check({"neeeded": 1})
    assert [(p.code, p.place.path) for p in problems] == [("FR005", "nodes.n.neeeded")]
    _, problems = check({"needed": 1, "low": 6, "high": "9"})
    assert [p.place.path for p in problems] == ["nodes.n.high"], (
        "low is above the default of high only for want of high"
    )


@pytest.mark.parametrize("data", [{"needed": [1]}, {"needed": {}}, {"needed": object()}, {"needed": 1, "inner": 3}, {}])
def test_anything_is_judged_without_an_exception(data: dict[str, Any]) -> None:
    assert check(data)[1]
