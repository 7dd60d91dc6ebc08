"""Data sets through the library `datasets`: local files, the cache, and a hub that is away."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from data_sets import faults, load_faults, place, types

from flowrl.data.hf import Hf
from flowrl.data.rows import Streamed

ROWS = [{"question": f"{number}+1=", "answer": f"so #### {number + 1}"} for number in range(150)]
TRAIN = {"rename": {"prompt": "question"}, "extract": {"answer": "#### (.*)"}}
WANTED = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(150)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.mark.parametrize("streaming", [False, True])
def test_local_files_give_columns_to_a_check_and_rows_to_a_load(file: str, streaming: bool) -> None:
    data = Hf(path="json", data_files=file, streaming=streaming, **TRAIN)
    assert types(data) == {"prompt": "str", "answer": "str"}
    assert faults(data, 150) == []
    assert "has 150" in faults(data, 151)[0][1]
    rows = data.load()
    assert isinstance(rows, Streamed) == streaming
    assert isinstance(rows, Streamed) or rows == WANTED
    if isinstance(rows, Streamed):
        assert rows.reaches(150)
        assert not rows.reaches(151)
        assert [rows[number] for number in range(150)] == WANTED


def test_a_folder_and_a_part_of_a_split(file: str) -> None:
    folder = str(Path(file).parent)
    assert Hf(path=folder, data_files="rows.jsonl", split="train[:10]", **TRAIN).load() == WANTED[:10]
    assert len(Hf(path="json", data_files={"test": file}, split="test").load()) == 150


def test_a_check_of_local_files_makes_no_copy_in_the_cache(file: str, tmp_path: Path) -> None:
    assert types(Hf(path="json", data_files=file)) == {"question": "str", "answer": "str"}
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize(
    ("settings", "path", "fact"),
    [
        ({"path": "json"}, "path", "needs files to read"),
        ({"path": "json", "data_files": "/no/such.jsonl"}, "path", "Unable to find"),
        ({"path": "/no/such/folder"}, "path", "there is no folder"),
        ({"path": "json", "split": "test"}, "split", "Unknown split"),
        ({"path": "json", "columns": {"qestion": "str"}}, "columns.qestion", "has no column"),
    ],
)
def test_what_is_not_there_is_told_at_its_key(file: str, settings: dict[str, Any], path: str, fact: str) -> None:
    if settings["path"] == "json" and len(settings) == 2 and "data_files" not in settings:
        settings = {**settings, "data_files": file}
    (problem,) = load_faults(Hf(**settings))
    assert problem.place.path == path
    assert fact in problem.fact


def test_dates_are_refused_unless_they_are_left_out(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = str(tmp_path / "data.parquet")
    pq.write_table(pa.table({"prompt": ["a"], "at": [datetime.datetime(2026, 1, 1)]}), path)
    assert "which no field can hold" in faults(Hf(path="parquet", data_files=path))[0][1]
    assert Hf(path="parquet", data_files=path, columns={"prompt": "str"}).load() == [{"prompt": "a"}]


def test_a_set_of_the_hub_is_not_asked_for_by_a_check_and_is_refused_at_once_without_a_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from huggingface_hub import HfApi

    def away(*arguments: Any, **settings: Any) -> None:
        raise OSError("no route to the hub")

    monkeypatch.setattr(HfApi, "dataset_info", away)
    start = time.monotonic()
    unknown = Hf(path="somebody/sums", name="main")
    (problem,) = unknown.problems(place)
    assert "is not in the cache of this machine" in problem.fact
    assert problem.fix.startswith("declare them")
    declared = Hf(path="somebody/sums", name="main", columns={"question": "str", "answer": "str"}, **TRAIN)
    assert (faults(declared, 10_000), types(declared)) == ([], {"prompt": "str", "answer": "str"})
    assert "the hub cannot be reached: no route to the hub" in load_faults(declared)[0].fact
    assert time.monotonic() - start < 5


def test_what_the_cache_holds_is_read_without_a_network(file: str, tmp_path: Path) -> None:
    import datasets

    datasets.load_dataset(
        "json", data_files=file, split="train", cache_dir=str(tmp_path / "made")
    )  # as the hub's would be, under another name
    (made,) = (path for path in tmp_path.glob("made/json/*/*/*") if path.is_dir())
    there = tmp_path / "cache" / "somebody___sums" / "main" / "0.0.0" / "abc"
    there.mkdir(parents=True)
    info = json.loads((made / "dataset_info.json").read_text())
    info |= {"config_name": "main", "dataset_name": "sums"}
    (there / "dataset_info.json").write_text(json.dumps(info))
    (there / "sums-train.arrow").write_bytes((made / "json-train.arrow").read_bytes())
    data = Hf(path="somebody/sums", name="main", **TRAIN)
    assert types(data) == {"prompt": "str", "answer": "str"}
    assert faults(data, 150) == []
    assert data.load() == WANTED


def test_a_check_of_json_files_needs_no_library_and_finds_what_it_would(file: str, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"question": "a", "answer": null}\n')
    (tmp_path / "list.json").write_text('[{"question": "a", "answer": "b"}]')
    code = (
        "import sys\nfrom flowrl.data.hf import Hf\n"
        "assert Hf(path='json', data_files=sys.argv[1]).field_types().keys() == {'question', 'answer'}\n"
        "assert 'datasets' not in sys.modules and 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, file], check=True)
    for files in (file, [file, file], str(tmp_path / "list.json"), str(tmp_path / "rows*.jsonl")):
        data = Hf(path="json", data_files=files)
        assert types(data) == {"question": "str", "answer": "str"}
        assert faults(data, 1) == []
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n{"question": ')
    assert "cannot be read" in faults(Hf(path="json", data_files=file))[0][1]
