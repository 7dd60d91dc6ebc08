"""Parquet files."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sets import faults, load_faults, place, types

from flowrl.data.parquet import Parquet

QUESTIONS = {"question": ["1+1=", "2+2="], "answer": ["one #### 2", "two #### 4"]}


def written(folder: Path, columns: dict[str, Any] | pa.Table, name: str = "data.parquet") -> Parquet:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    pq.write_table(table, folder / name)
    return Parquet(path=str(folder / name))


def test_columns_come_from_the_schema_and_rows_as_they_are(tmp_path: Path) -> None:
    columns = {
        "prompt": pa.array(["a", "b"]),
        "kind": pa.array(["x", "x"]).dictionary_encode(),
        "n": pa.array([1, 2], pa.uint8()),
        "x": pa.array([0.5, None]),
        "ok": pa.array([True, False]),
        "chat": pa.array([[{"role": "user", "content": "😀"}], None]),
        "nothing": pa.nulls(2),
    }
    data = written(tmp_path, columns)
    assert types(data) == {
        "prompt": "str", "kind": "str", "n": "int", "x": "float", "ok": "bool", "chat": "json", "nothing": "json",
    }  # fmt: skip
    assert faults(data, 2) == []
    first = {"prompt": "a", "kind": "x", "n": 1, "x": 0.5, "ok": True, "chat": [{"role": "user", "content": "😀"}]}
    assert data.load() == [
        {**first, "nothing": None},
        {"prompt": "b", "kind": "x", "n": 2, "x": None, "ok": False, "chat": None, "nothing": None},
    ]


def test_files_come_in_order_from_a_pattern_or_a_list(tmp_path: Path) -> None:
    for number in (2, 1):
        written(tmp_path, {"prompt": [f"{number}a", f"{number}b"]}, f"part-{number}.parquet")
    pattern = Parquet(path=str(tmp_path / "part-*.parquet"))
    assert [row["prompt"] for row in pattern.load()] == ["1a", "1b", "2a", "2b"]
    chosen = Parquet(path=[str(tmp_path / "part-2.parquet"), str(tmp_path / "part-1.parquet")])
    assert [row["prompt"] for row in chosen.load()] == ["2a", "2b", "1a", "1b"]
    assert faults(Parquet(path=str(tmp_path / "no-*.parquet")))[0][1].startswith("no file matches")


def test_files_must_have_the_same_columns(tmp_path: Path) -> None:
    written(tmp_path, {"prompt": ["a"], "n": [1]}, "1.parquet")
    written(tmp_path, {"prompt": ["a"], "n": ["x"]}, "2.parquet")
    ((path, fact),) = faults(Parquet(path=str(tmp_path / "*.parquet")))
    assert path == "path"
    assert "differ in the column 'n'" in fact
    assert faults(Parquet(path=str(tmp_path / "*.parquet"), columns={"prompt": "str"})) == []


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (pa.array([datetime.datetime(2026, 1, 1)]), "timestamp"),
        (pa.array([b"a"]), "binary"),
        (pa.array([{"at": datetime.date(2026, 1, 1)}]), "struct"),
        (pa.array([[b"a"]]), "list"),
    ],
)
def test_a_type_that_no_field_holds_is_refused_unless_the_column_is_left_out(
    tmp_path: Path, values: pa.Array, kind: str
) -> None:
    data = written(tmp_path, {"prompt": ["a"], "odd": values})
    ((path, fact),) = faults(data)
    assert path == "path"
    assert f"'odd' of '{data.path}' is of type {kind}" in fact
    assert types(data) == {}
    assert load_faults(data)[0].fact == fact
    assert data.model_copy(update={"columns": {"prompt": "str"}}).load() == [{"prompt": "a"}]


def test_bad_rows_are_named_with_file_and_number(tmp_path: Path) -> None:
    data = written(tmp_path, {"prompt": ["a", None], "x": [float("inf"), float("nan")]})
    ((path, fact),) = faults(data)
    assert (path, fact) == ("path", f"row 1 of '{data.path}': 'x' is inf, which is no finite number")
    (problem,) = load_faults(data)
    assert problem.notes == (f"row 2 of '{data.path}': 'prompt' is null, but a string in the schema",)


def test_a_whole_number_beyond_64_bits_is_a_bad_row(tmp_path: Path) -> None:
    data = written(tmp_path, {"n": pa.array([2**63], pa.uint64())})
    assert "'n' is 9223372036854775808, but a whole number in the schema" in faults(data)[0][1]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    data = written(tmp_path, pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]))
    assert "two columns 'prompt'" in faults(data)[0][1]


def test_files_that_are_missing_or_no_parquet(tmp_path: Path) -> None:
    written(tmp_path, QUESTIONS)
    missing = Parquet(path=str(tmp_path / "dat.parquet"))
    assert missing.problems(place)[0].fix == ("did you mean 'data.parquet'?")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    (tmp_path / "empty.parquet").write_text("")
    for name in ("text", "empty"):
        assert "is no Parquet file" in faults(Parquet(path=str(tmp_path / f"{name}.parquet")))[0][1]


def test_no_rows_are_told(tmp_path: Path) -> None:
    data = written(tmp_path, {"prompt": pa.array([], pa.string())})
    assert "has 0" in faults(data)[0][1]
    assert "has no rows" in load_faults(data)[0].fact


def test_columns_are_renamed_and_cut_out(tmp_path: Path) -> None:
    written(tmp_path, QUESTIONS)
    settings = {"rename": {"prompt": "question"}, "extract": {"answer": r"####\s*(\S+)"}}
    data = Parquet(path=str(tmp_path / "data.parquet"), **settings)
    assert types(data) == {"prompt": "str", "answer": "str"}
    assert data.load() == [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


def test_the_fingerprint_is_that_of_the_bytes_and_of_what_is_taken(tmp_path: Path) -> None:
    data = written(tmp_path, QUESTIONS)
    again = written(tmp_path, QUESTIONS, "copy.parquet")
    assert data.fingerprint() == again.fingerprint()
    others = [data.model_copy(update=more) for more in ({"limit": 1}, {"rename": {"prompt": "question"}})]
    assert len({data.fingerprint(), *(one.fingerprint() for one in others)}) == 3
