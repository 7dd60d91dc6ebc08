"""What all data sets with rows of their own share: columns, new names, parts of text, prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from data_sets import faults, load_faults, types
from pydantic import ValidationError

from flowrl.data.jsonl import Jsonl

USER = {"role": "user", "content": "hi"}


def written(folder: Path, *rows: Any, **settings: Any) -> Jsonl:
    path = folder / "data.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return Jsonl(path=str(path), **settings)


def test_declared_columns_are_read_and_no_others(tmp_path: Path) -> None:
    data = written(
        tmp_path, {"prompt": "a", "x": 1, "y": {}}, {"prompt": "b", "x": 2.5}, columns={"prompt": "str", "x": "float"}
    )
    assert types(data) == {"prompt": "str", "x": "float"}
    assert data.load() == [{"prompt": "a", "x": 1.0}, {"prompt": "b", "x": 2.5}]
    wrong = written(tmp_path, {"prompt": "a"}, columns={"prompt": "int"})
    assert faults(wrong)[0][1] == "bad line: 'prompt' is \"a\", but a whole number as declared"


def test_new_names_keep_the_place_of_the_column(tmp_path: Path) -> None:
    data = written(tmp_path, {"question": "a", "answer": "b"}, rename={"prompt": "question", "again": "question"})
    assert list(types(data)) == ["prompt", "again", "answer"]
    assert data.load() == [{"prompt": "a", "again": "a", "answer": "b"}]
    swapped = written(tmp_path, {"a": "1", "b": "2"}, rename={"a": "b", "b": "a"})
    assert swapped.load() == [{"b": "1", "a": "2"}]


def test_a_name_that_is_taken_or_leads_nowhere_is_refused(tmp_path: Path) -> None:
    row = {"question": "a", "prompt": "b"}
    taken = written(tmp_path, row, rename={"prompt": "question"})
    ((path, fact),) = faults(taken)
    assert path == "rename.prompt"
    assert "has a column 'prompt' already" in fact
    assert load_faults(taken)[0].fact == fact
    (problem,) = load_faults(written(tmp_path, row, rename={"x": "qestion"}))
    assert (problem.place.path, problem.fix) == ("rename.x", "did you mean 'question'?")


def test_an_extract_takes_the_first_match_or_its_first_group(tmp_path: Path) -> None:
    rows = [{"a": "x #### 12", "b": "n=3 n=4"}]
    data = written(tmp_path, *rows, extract={"a": "#### (.*)", "b": "n=."})
    assert data.load() == [{"a": "12", "b": "n=3"}]
    lost = written(tmp_path, *rows, {"a": "none", "b": "n=1"}, extract={"a": "#### (.*)"})
    assert faults(lost) == [("", "bad line: 'a' is \"none\", in which '#### (.*)' finds nothing")]
    assert faults(written(tmp_path, *rows, extract={"c": "."}))[0][0] == "extract.c"
    with pytest.raises(ValidationError, match="is no regular expression"):
        written(tmp_path, *rows, extract={"a": "("})


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    data = written(tmp_path, *[{"prompt": str(number)} for number in range(200)], limit=120)
    assert len(data.load()) == 120
    assert "has 120" in faults(data, 121)[0][1]


def test_prompts_may_be_chat_messages(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": ""}, USER, {"role": "user", "content": [{"type": "text", "text": "x"}]}]
    data = written(tmp_path, {"prompt": chat}, {"prompt": "plain"})
    assert types(data) == {"prompt": "json"}
    assert data.load() == [{"prompt": chat}, {"prompt": "plain"}]


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        ([], "it holds no message"),
        (["hi"], "message 1 is no mapping of role and content"),
        ([USER, {"content": "x"}], "message 2 has no role"),
        ([{"role": "", "content": "x"}], "message 1 has no role"),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"role": "user", "content": None}], "message 1 has no content"),
        ({"role": "user", "content": "x"}, "a prompt is a string or a list of chat messages"),
        (None, "a prompt is a string or a list of chat messages"),
    ],
)
def test_malformed_messages_are_refused_with_their_row(tmp_path: Path, prompt: Any, fault: str) -> None:
    data = written(tmp_path, {"prompt": [USER]}, {"prompt": prompt})
    (problem,) = load_faults(data)
    assert problem.place.line == 2
    assert problem.fact.endswith(f"which is no prompt: {fault}")


def test_half_of_a_character_is_refused_at_every_depth_and_whole_ones_are_kept(tmp_path: Path) -> None:
    whole = {"prompt": [{"role": "user", "content": "😀é\u2028"}], "info": {"😀": ["é"]}}
    assert written(tmp_path, whole).load() == [whole]
    for bad in ('{"info": [{"a": "\\ud800"}]}', '{"info": {"\\udfff": 1}}'):
        assert "holds half of a character" in load_faults(written(tmp_path, bad))[0].fact


def test_a_key_that_stands_twice_in_an_object_is_a_bad_line(tmp_path: Path) -> None:
    assert "'a' stands twice" in load_faults(written(tmp_path, '{"a": 1, "a": 2}'))[0].fact


def test_a_number_that_32_bits_cannot_hold_is_a_bad_line(tmp_path: Path) -> None:
    assert "but a number in the rows before" in load_faults(written(tmp_path, {"x": 0.5}, {"x": 1e39}))[0].fact
