"""The arithmetic data set."""

from __future__ import annotations

import random

import pytest
from pydantic import ValidationError

from flowrl.data.arithmetic import Arithmetic
from flowrl.errors import Place
from flowrl.fields import FieldType


def place(key: str, *more: str) -> Place:
    return Place("p.yaml", path=key)


def test_the_rows_are_those_of_the_peer_benchmark() -> None:
    draw = random.Random(0)
    pairs = [(draw.randrange(50), draw.randrange(50)) for _ in range(4096)]
    rows = Arithmetic().load()
    assert [(row["prompt"], row["answer"]) for row in rows] == [(f"{a}+{b}=", str(a + b)) for a, b in pairs]


def test_rows_hold_the_declared_columns() -> None:
    data = Arithmetic(size=5)
    assert all(set(row) == set(data.field_types()) for row in data.load())
    assert data.field_types()["prompt"] == FieldType("Prompt", "str")


def test_summands_keep_to_the_range() -> None:
    for row in Arithmetic(size=200, low=7, high=10).load():
        a, b = row["prompt"].rstrip("=").split("+")
        assert {int(a), int(b)} <= {7, 8, 9}


def test_settings_make_the_fingerprint() -> None:
    prints = {data.fingerprint() for data in (Arithmetic(), Arithmetic(seed=1), Arithmetic(size=3), Arithmetic(high=9))}
    assert len(prints) == 4
    assert Arithmetic().fingerprint() == Arithmetic(shuffle=False).fingerprint()


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(ValidationError, match="must be below"):
        Arithmetic(low=5, high=5)


def test_fewer_rows_than_a_batch_are_a_problem() -> None:
    assert Arithmetic(size=8).problems(place, 8) == []
    (problem,) = Arithmetic(size=7).problems(place, 8)
    assert (problem.code, problem.place.path) == ("FR018", "size")
