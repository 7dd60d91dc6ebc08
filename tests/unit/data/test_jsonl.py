"""A user's own JSON Lines file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.data.jsonl import Jsonl
from flowrl.errors import PipelineError, Place


def place(key: str, *more: str) -> Place:
    return Place("p.yaml", 3, path=key)


def written(folder: Path, *rows: Any) -> Jsonl:
    """A set of the rows; a string is a raw line."""
    path = folder / "data.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return Jsonl(type="jsonl", path=str(path))


def bad_lines(data: Jsonl) -> list[tuple[int, str]]:
    """Number and fault of every bad line, which check and load must agree on."""
    checked = [(problem.place.line, problem.fact.removeprefix("bad line: ")) for problem in data.problems(place)]
    with pytest.raises(PipelineError) as raised:
        data.load()
    loaded = [(problem.place.line, problem.fact.removeprefix("bad line: ")) for problem in raised.value.problems]
    assert checked == loaded
    assert all(problem.code == "FR018" and problem.place.file == data.path for problem in raised.value.problems)
    return loaded


def test_columns_are_declared_from_the_rows(tmp_path: Path) -> None:
    data = written(
        tmp_path,
        {"prompt": "a", "n": 1, "x": 1, "ok": True, "info": {"k": 1}, "list": [1], "maybe": None, "later": None},
        {"prompt": "b", "n": 2, "x": 0.5, "ok": False, "info": "text", "list": None, "maybe": None, "later": 2.5},
        {"prompt": "c", "n": 3, "ok": False},
    )
    assert {name: str(kind) for name, kind in data.field_types().items()} == {
        "prompt": "Prompt[str]", "n": "Prompt[int]", "x": "Prompt[float]", "ok": "Prompt[bool]",
        "info": "Prompt[json]", "list": "Prompt[json]", "maybe": "Prompt[json]", "later": "Prompt[float]",
    }  # fmt: skip
    assert data.problems(place) == []
    rows = data.load()
    assert all(set(row) == set(data.field_types()) for row in rows)
    assert [row["x"] for row in rows] == [1.0, 0.5, None]
    assert all(isinstance(row["x"], float | None) for row in rows)


def test_bad_lines_are_named_with_their_numbers_in_one_go(tmp_path: Path) -> None:
    data = written(
        tmp_path,
        {"prompt": "a", "answer": 1},
        "",
        '{"prompt": "a", "answer": 1',
        "[1, 2]",
        {"prompt": "a"},
        {"prompt": 3, "answer": 1},
        {"prompt": None, "answer": 1},
        '{"prompt": "a", "answer": NaN}',
        {"prompt": "a", "answer": True},
        {"prompt": "a", "answer": 2**63},
        '{"prompt": "\\ud800", "answer": 1}',
    )
    assert bad_lines(data) == [
        (3, "not JSON: Expecting ',' delimiter at column 28"),
        (4, "not an object of columns and values"),
        (5, "the column 'answer' is missing"),
        (6, "'prompt' is 3, but a string in the rows before"),
        (7, "'prompt' is null, but a string in the rows before"),
        (8, "not JSON: NaN is no number; write null for a missing one"),
        (9, "'answer' is true, but a whole number in the rows before"),
        (10, "'answer' is 9223372036854775808, but a whole number in the rows before"),
        (11, "'prompt' is \"\\ud800\", which holds half of a character"),
    ]


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert bad_lines(Jsonl(path=str(path))) == [(2, "not UTF-8 text at byte 12")]


def test_at_most_ten_bad_lines_are_listed(tmp_path: Path) -> None:
    assert [number for number, _ in bad_lines(written(tmp_path, *["x"] * 30))] == list(range(1, 11))


def test_check_reads_the_first_rows_and_load_all(tmp_path: Path) -> None:
    data = written(tmp_path, *[{"prompt": "a"}] * 100, {"prompt": 3}, {"prompt": "b", "new": 1})
    assert data.problems(place) == []
    with pytest.raises(PipelineError) as raised:
        data.load()
    assert [problem.place.line for problem in raised.value.problems] == [101, 102]
    assert "'new' is not in the first 100 rows" in raised.value.problems[1].fact


def test_a_missing_file_is_told_at_its_path_with_the_nearest_name(tmp_path: Path) -> None:
    written(tmp_path, {"prompt": "a"})
    data = Jsonl(path=str(tmp_path / "daat.jsonl"))
    (problem,) = data.problems(place)
    assert (problem.code, problem.place.line, problem.place.path) == ("FR018", 3, "path")
    assert problem.fix == "did you mean 'data.jsonl'?"
    assert data.field_types() == {}
    with pytest.raises(PipelineError, match="No such file"):
        data.load()


def test_fewer_rows_than_a_batch_are_a_problem(tmp_path: Path) -> None:
    data = written(tmp_path, *[{"prompt": "a"}] * 150)
    assert data.problems(place, 150) == []
    assert "has 150" in data.problems(place, 151)[0].fact
    empty = written(tmp_path, "", "  ")
    assert "has 0" in empty.problems(place)[0].fact
    with pytest.raises(PipelineError, match="has no rows"):
        empty.load()


def test_a_byte_order_mark_blank_lines_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "c"}'.encode())
    assert Jsonl(path=str(path)).load() == [{"prompt": "a\u2028b"}, {"prompt": "c"}]


def test_the_fingerprint_is_that_of_the_bytes(tmp_path: Path) -> None:
    first = written(tmp_path, {"prompt": "a"})
    (tmp_path / "copy.jsonl").write_bytes(Path(first.path).read_bytes())
    assert first.fingerprint() == Jsonl(path=str(tmp_path / "copy.jsonl")).fingerprint()
    before = first.fingerprint()
    assert written(tmp_path, {"prompt": "b"}).fingerprint() != before
