"""The limit on prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from data_sets import by_length, place

from flowrl.data.base import DataSet, Loading
from flowrl.data.limit import PATIENCE
from flowrl.data.rows import Loaded, Row, Streamed
from flowrl.data.stream import PromptStream
from flowrl.errors import PipelineError, RunError


class Given(DataSet):
    """These rows."""

    given: Any = None

    def field_types(self) -> Any:
        return {}

    def problems(self, *_: Any, **__: Any) -> Any:
        return []

    def rows(self, place: Any) -> Loaded:
        return self.given  # type: ignore[no-any-return]

    def fingerprint(self) -> str:
        return self.digest(self.given)


def rows_of(*lengths: int) -> list[Row]:
    return [{"prompt": "x" * length} for length in lengths]


def loaded(rows: Any, limit: int | None = 8, overlong: Any = "drop", lengths: Any = None) -> tuple[Any, list[str]]:
    notes: list[str] = []
    data = Given(given=rows, max_prompt_tokens=limit, overlong=overlong)
    return data.load(Loading("data.train", place, lengths or by_length(), notes.append)), notes


def test_a_prompt_of_exactly_the_limit_is_kept() -> None:
    rows, notes = loaded(rows_of(3, 8, 9, 7))
    assert [len(row["prompt"]) for row in rows] == [3, 8, 7]
    assert notes == ["data.train: 1 of 4 prompts have more than 8 tokens and are left out; the longest has 9"]


def test_without_a_limit_nothing_is_counted() -> None:
    def never(rows: Sequence[Row]) -> list[int]:
        raise AssertionError

    assert loaded(rows_of(9), None, lengths=never) == (rows_of(9), [])


def test_that_all_are_short_is_reported_too() -> None:
    assert loaded(rows_of(3, 8))[1] == ["data.train: all 2 prompts have at most 8 tokens; the longest has 8"]


def test_an_error_names_the_first_ten_rows_and_their_lengths() -> None:
    with pytest.raises(PipelineError) as raised:
        loaded(rows_of(3, *range(9, 21)), overlong="error")
    (problem,) = raised.value.problems
    assert (problem.code, problem.place.path) == ("FR018", "max_prompt_tokens")
    assert problem.fact == "12 of 13 prompts have more than 8 tokens"
    assert problem.fix == "max_prompt_tokens: 20, or overlong: drop"
    assert problem.notes[0] == 'row 2 has 9: "xxxxxxxxx"'
    assert (len(problem.notes), problem.notes[-1]) == (11, "and 2 more")
    assert loaded(rows_of(3, 8), overlong="error")[0] == rows_of(3, 8)


def test_that_nobody_counts_is_said_once_and_all_rows_stay() -> None:
    rows, notes = loaded(rows_of(9), lengths=lambda rows: None)
    assert (rows, notes) == (rows_of(9), ["data.train: max_prompt_tokens has no effect: no rollout counts the tokens"])


def test_a_stream_is_measured_when_it_is_read() -> None:
    source = iter(rows_of(*[5, 9] * 200))
    rows, notes = loaded(Streamed(source, 16))
    assert isinstance(rows, Streamed)
    assert rows.reaches(3)
    assert next(source)
    assert len(notes) == 1
    assert not rows.reaches(201)
    assert {len(rows[position]["prompt"]) for position in range(rows.num_read)} == {5}
    assert "prompts have more than 8 tokens and are left out; the longest has 9" in notes[-1]


def test_a_long_prompt_of_a_stream_ends_a_run_that_asks_for_it() -> None:
    stream = PromptStream(loaded(Streamed(iter(rows_of(*[5] * 100, 9)), 4), overlong="error")[0], 0, shuffle=False)
    assert len(stream.take(60)) == 60
    with pytest.raises(RunError, match="1 of 101 prompts have more than 8 tokens"):
        stream.take(60)


def test_an_endless_stream_of_long_prompts_is_given_up() -> None:
    with pytest.raises(PipelineError, match="prompts have more than 8 tokens"):
        loaded(Streamed(({"prompt": "x" * 9} for _ in itertools.count()), 4))[0].reaches(1)
    assert PATIENCE > 1000


def test_what_is_dropped_is_part_of_the_fingerprint() -> None:
    prints = [
        Given(given=[1], max_prompt_tokens=limit, overlong=overlong).fingerprint()
        for limit, overlong in ((None, "drop"), (8, "drop"), (9, "drop"), (9, "error"))
    ]
    assert len(set(prints)) == 3
    assert prints[0] == prints[3]
