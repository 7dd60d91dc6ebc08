"""Parameters of every type that a class may have, set from YAML and shown in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import flowrl
from flowrl.errors import Problem
from flowrl.model import default_values
from flowrl.registry import BrokenNode, find

NODES = """
import datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from flowrl import Node, Sample


class Color(Enum):
    red = "r"
    blue = 2


class Inner(BaseModel):
    a: int = 1
    b: float = 0.5


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int = 1


class Base(Node):
    class Out(NamedTuple):
        extra: Sample[float]

    def run(self, reward: Sample[float]) -> Out:
        return self.Out(reward)


class Kinds(Base):
    path: Path = Path("a/b")
    color: Color = Color.red
    numbers: set[int] = {1}
    day: datetime.date = datetime.date(2020, 1, 2)
    exact: Decimal = Decimal("1.5")
    raw: bytes = b"x"
    most: float = Field(float("inf"), allow_inf_nan=True)
    made: list[int] = Field(default_factory=lambda: [3])
    inner: Inner = Inner()
    inners: dict[str, list[Inner]] = {}
    auto: bool | Literal["auto"] = "auto"
    size: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    mixed: Literal[1, "two", True] = 1
    start: str = Field("ab", pattern="^ab")


class Opened(Base):
    inner: Open = Open()


class Must(Base):
    must: int | None


class Wordy(Base):
    x: int = 1

    @field_validator("x")
    @classmethod
    def _no_two(cls, x: int) -> int:
        if x == 2:
            raise ValueError("bad\\nin two lines")
        return x


class Bytes(Base):
    raw: bytes = b"\\xff"


class Anything(Base):
    model_config = ConfigDict(arbitrary_types_allowed=True)
    it: object = object()


class Alias(Base):
    rate: float = Field(1.0, alias="lr")


class WrongDefault(Base):
    pair: tuple[int, int] = (1, "x")
"""


def pipeline(folder: Path, name: str, parameters: str = "") -> flowrl.Pipeline:
    (folder / "n.py").write_text(NODES)
    file = folder / "p.yaml"
    file.write_text(f"extends: grpo_sync\nnodes: {{k: {{use: './n.py:{name}'{parameters}}}}}\n")
    return flowrl.load(file)


def errors(folder: Path, name: str, parameters: str = "") -> list[Problem]:
    return [one for one in pipeline(folder, name, parameters).check() if one.severity == "error"]


def test_parameters_of_any_type_are_set_and_shown_as_yaml_has_them(tmp_path: Path) -> None:
    given = "path: q/r, color: 2, numbers: [4], day: '2021-02-03', exact: '2.5', raw: hi, inner: {a: 2}, made: []"
    for parameters, path, inner in (("", "a/b", {"a": 1, "b": 0.5}), (f", {given}", "q/r", {"a": 2, "b": 0.5})):
        one = pipeline(tmp_path, "Kinds", parameters)
        assert all(problem.severity == "warning" for problem in one.check())
        shown = yaml.safe_load(one.resolved())
        assert (shown["nodes"]["k"]["path"], shown["nodes"]["k"]["inner"]) == (path, inner)
        (tmp_path / "again.yaml").write_text(one.resolved())
        again = flowrl.load(tmp_path / "again.yaml")
        assert again.plan().graph.nodes["k"].node == one.plan().graph.nodes["k"].node


def test_defaults_are_shown_in_yaml(tmp_path: Path) -> None:
    (tmp_path / "n.py").write_text(NODES)
    defaults = default_values(find("./n.py:Kinds", tmp_path).load())
    assert (defaults["most"], defaults["made"], defaults["color"]) == (float("inf"), [3], "r")


@pytest.mark.parametrize(
    ("parameters", "fact"),
    [
        ("inner: {a: '1'}", "nodes.k.inner.a must be a whole number, not '1'"),
        ("inner: {zz: 1}", "nodes.k.inner has no key 'zz'"),
        ("inners: {x: [{a: 1}, {a: '1'}]}", "nodes.k.inners.x[1].a must be a whole number, not '1'"),
        ("path: 3", "nodes.k.path must be a string, not 3"),
        ("numbers: [1, x]", "nodes.k.numbers[1] must be a whole number, not 'x'"),
        ("color: red", "nodes.k.color must be r or 2, not 'red'"),
        ("auto: 3", "nodes.k.auto must be true, false or auto, not 3"),
        ("size: 0", "nodes.k.size must be at least 1 or auto, not 0"),
        ("mixed: 5", "nodes.k.mixed must be 1, two or true, not 5"),
    ],
)
def test_a_value_inside_or_of_several_types_is_judged_strictly(tmp_path: Path, parameters: str, fact: str) -> None:
    assert [problem.fact for problem in errors(tmp_path, "Kinds", f", {parameters}")] == [fact]


@pytest.mark.parametrize(
    ("parameters", "fix"),
    [
        ("start: q", "leave it out for its default, ab"),
        ("auto: yes", "write true"),
        ("size: auot", "did you mean 'auto'?"),
    ],
)
def test_the_fix_is_of_the_value_written(tmp_path: Path, parameters: str, fix: str) -> None:
    assert [problem.fix for problem in errors(tmp_path, "Kinds", f", {parameters}")] == [fix]


def test_a_model_that_takes_any_key_says_so_itself(tmp_path: Path) -> None:
    assert errors(tmp_path, "Opened", ", inner: {more: 3}") == []


def test_null_for_a_required_parameter_is_told_apart(tmp_path: Path) -> None:
    (problem,) = errors(tmp_path, "Must", ", must: null")
    assert problem.code == "FR008" and "null counts as left out" in problem.fix


def test_a_message_of_several_lines_stays_in_its_frame(tmp_path: Path) -> None:
    (problem,) = errors(tmp_path, "Wordy", ", x: 2")
    assert "  nodes.k.x: bad\n   | in two lines\n    2 | " in problem.render()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Bytes", "default of parameter 'raw' has no form in YAML"),
        ("Anything", "default of parameter 'it' has no form in YAML"),
        ("Alias", "parameter 'rate' has an alias"),
        ("WrongDefault", "the default of 'pair.1' is wrong"),
    ],
)
def test_a_parameter_that_yaml_cannot_hold_breaks_its_class(tmp_path: Path, name: str, words: str) -> None:
    (problem,) = errors(tmp_path, name)
    assert problem.code == "FR014" and words in problem.fact
    with pytest.raises(BrokenNode, match=words):
        find("./n.py:" + name, tmp_path).load()
