"""Mixtures: shares, columns, identity."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_sets import by_length, faults, load_faults, place, types
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flowrl.data.arithmetic import Arithmetic
from flowrl.data.base import Loading
from flowrl.data.jsonl import Jsonl
from flowrl.data.mixture import Mixture
from flowrl.data.rows import Mixed, Part, Streamed
from flowrl.data.stream import Pattern, PromptStream


def rows_of(name: str, num: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name}{number}"} for number in range(num)]


def lines(folder: Path, name: str, *rows: Any) -> Jsonl:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Jsonl(path=str(folder / f"{name}.jsonl"))


def two(folder: Path, first: Any, second: Any, **settings: Any) -> Mixture:
    return Mixture(sources={"a": lines(folder, "a", first), "b": lines(folder, "b", second)}, **settings)


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_every_stretch_holds_the_share_of_each_source_to_within_one_prompt(weights: list[float]) -> None:
    pattern, counts = Pattern(weights), [0] * len(weights)
    for position in range(300):
        source, turn = pattern.at(position)
        assert turn == counts[source]
        counts[source] += 1
        for share, count in zip(pattern.shares, counts, strict=True):
            assert abs(count - share * (position + 1)) <= 1 + 1e-6


def test_small_sources_repeat_and_no_batch_holds_a_row_twice() -> None:
    mixed = Mixed((Part(rows_of("a", 40), 3.0), Part(rows_of("b", 5), 1.0)))
    stream, taken = PromptStream(mixed, seed=0), []
    for _ in range(30):
        batch = stream.take(8)
        assert len({prompt.row["prompt"] for prompt in batch}) == 8
        taken += batch
    assert len({prompt.uid for prompt in taken}) == 240
    assert Counter(prompt.row["prompt"][0] for prompt in taken) == {"a": 180, "b": 60}
    assert Counter(prompt.row["prompt"] for prompt in taken if prompt.row["prompt"][0] == "b").keys() == {
        f"b{number}" for number in range(5)
    }


def test_order_follows_from_seed_and_epoch_and_goes_on_from_a_state() -> None:
    def stream(seed: int) -> PromptStream:
        endless = Streamed(({"prompt": f"c{number}"} for number in range(10**6)), 16)
        return PromptStream(Mixed((Part(rows_of("a", 9), 2.0), Part(rows_of("b", 7)), Part(endless))), seed)

    whole = stream(1)
    expected = [whole.take(4) for _ in range(12)]
    assert expected[:3] != [stream(2).take(4) for _ in range(3)]
    state, got = stream(1).state(), []
    for _ in range(12):
        resumed = stream(1)
        resumed.load_state(state)
        got.append(resumed.take(4))
        state = resumed.state()
    assert got == expected


def test_rows_name_their_source_unless_they_do_so_themselves(tmp_path: Path) -> None:
    data = two(tmp_path, {"prompt": "x"}, {"prompt": "y", "data_source": "own"})
    assert types(data) == {"prompt": "str", "data_source": "str"}
    named = {prompt.row["prompt"]: prompt.row["data_source"] for prompt in PromptStream(data.load(), 0).take(2)}
    assert named == {"x": "a", "y": "own"}


def test_columns_must_agree_and_the_problem_names_both_sources(tmp_path: Path) -> None:
    data = two(tmp_path, {"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": 1, "more": 2})
    assert faults(data) == [
        ("sources.b.type", "sources differ: 'a' has 'answer' as str, 'b' has 'answer' as int"),
        ("sources.b.type", "sources differ: 'a' has no 'more', 'b' has 'more' as int"),
    ]
    assert types(data) == {}
    assert len(load_faults(data)) == 2
    assert types(data.model_copy(update={"columns": ["prompt"]})) == {"prompt": "str"}
    assert faults(data.model_copy(update={"columns": ["prompt", "x"]})) == [("columns", "no source has a column 'x'")]


def test_wider_types_hold_both(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "y"}]
    data = two(tmp_path, {"prompt": "x", "n": 1}, {"prompt": chat, "n": 0.5})
    assert types(data) == {"prompt": "json", "n": "float", "data_source": "str"}
    assert faults(data) == []


def test_problems_of_sources_are_told_at_their_keys() -> None:
    data = Mixture(sources={"a": Jsonl(path="/no/such.jsonl"), "b": Arithmetic(size=3)}, weights={"b": 3.0})
    assert [path for path, _ in faults(data, 8)] == ["sources.a.path", "sources.b.size"]
    assert faults(Mixture(sources={"b": Arithmetic(size=4), "c": Arithmetic(size=4)}), 8) == []


def test_weights_are_above_zero_and_of_sources_that_there_are() -> None:
    for weights in ({"b": 0.0}, {"b": -1.0}, {"c": 1.0}):
        with pytest.raises(ValidationError):
            Mixture(sources={"b": Arithmetic()}, weights=weights)


def test_shares_are_reported_and_the_limit_holds_for_every_source() -> None:
    notes: list[str] = []
    sources = {"long": Arithmetic(size=20, low=10), "short": Arithmetic(size=20, high=10)}
    data = Mixture(sources=sources, weights={"short": 3.0}, max_prompt_tokens=4)
    mixed = data.load(Loading("data.train", place, by_length(), notes.append))
    assert [len(part.rows) for part in mixed.parts if not isinstance(part.rows, Streamed)] == [0, 20]
    assert notes == [
        "data.train.sources.long: 20 of 20 prompts have more than 4 tokens and are left out; the longest has 6",
        "data.train.sources.short: all 20 prompts have at most 4 tokens; the longest has 4",
        "data.train: long 25.0% of the prompts (0 rows), short 75.0% of the prompts (20 rows)",
    ]
    assert PromptStream(mixed, 0).shortage(8) == "2 prompts of 'long' are needed at once, but there are 0"


def test_sources_and_weights_make_the_fingerprint() -> None:
    prints = {
        Mixture(sources={"a": Arithmetic(seed=seed), "b": Arithmetic()}, weights={"a": weight}).fingerprint()
        for seed in (0, 1)
        for weight in (1.0, 2.0)
    }
    assert len(prints) == 4
