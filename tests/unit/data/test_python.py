"""Rows from a function of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from data_sets import faults, load_faults, place, types

from flowrl.data.base import Loading
from flowrl.data.python import Python
from flowrl.data.rows import Streamed
from flowrl.errors import PipelineError

CODE = """
import datetime
import os
import sys
import time
import numpy as np

CALLS = []

def sums(size=3, start=0):
    CALLS.append(size)
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(start, start + size)]

def endless():
    n = 0
    while True:
        yield {"prompt": str(n)}
        n += 1

def arrays():
    yield {"x": np.float32(0.5), "n": np.int64(3), "list": np.array([1, 2]), "pair": (1, 2), "none": float("nan")}

def breaks(after):
    for n in range(after):
        yield {"prompt": str(n)}
    raise KeyError("no more")

def dates():
    return [{"prompt": "a", "when": datetime.date(2026, 1, 1)}]

def words():
    return ["a"]

def text():
    return "abc"

def empty():
    return []

async def later():
    return []

def exits():
    sys.exit("no licence")

def exits_among_rows():
    yield {"prompt": "a"}
    raise SystemExit(3)

def interrupts():
    raise KeyboardInterrupt

def ends():
    os._exit(0)

def ends_among_rows():
    yield {"prompt": "a"}
    os._exit(5)

def crashes():
    os.kill(os.getpid(), 11)

def asks():
    return [{"prompt": input("which? ")}]

def prints():
    print("reading", flush=True)
    os.write(1, b"more")
    return [{"prompt": "a"}]

def sleeps():
    yield {"prompt": "a"}
    time.sleep(1000)

def holds_itself():
    row = []
    row += [row, row]
    return [{"prompt": "a", "more": row}]
"""


@pytest.fixture
def call(tmp_path: Path) -> Any:
    """A data set of a function of the file."""
    file = tmp_path / "rows.py"
    file.write_text(CODE)
    return lambda name, **settings: Python(call=f"{file}:{name}", **settings)


def test_rows_and_columns_are_those_that_the_function_returns(call: Any) -> None:
    data = call("sums", args={"size": 2, "start": 7})
    assert types(data) == {"prompt": "str", "answer": "str"}
    assert faults(data, 2) == []
    assert data.load() == [{"prompt": "7+1=", "answer": "8"}, {"prompt": "8+1=", "answer": "9"}]
    assert "has 2" in faults(data, 3)[0][1]


def test_values_of_numpy_become_plain_ones(call: Any) -> None:
    assert call("arrays").load() == [{"x": 0.5, "n": 3, "list": [1, 2], "pair": [1, 2], "none": None}]


def test_with_declared_columns_a_check_calls_nothing(call: Any) -> None:
    data = call("breaks", args={"after": 0}, columns={"prompt": "str"})
    assert faults(data, 1000) == []
    assert types(data) == {"prompt": "str"}
    assert "raised KeyError: 'no more'" in load_faults(data)[0].fact


@pytest.mark.parametrize(
    ("name", "settings", "path", "fact"),
    [
        ("sum", {}, "call", "has no function 'sum'"),
        ("CALLS", {}, "call", "is no function, but list"),
        ("sums", {"args": {"sice": 3}}, "args", "unexpected keyword argument 'sice'"),
        ("breaks", {}, "args", "missing a required argument: 'after'"),
        ("breaks", {"args": {"after": 1}}, "call", "raised KeyError: 'no more' ("),
        ("words", {}, "call", "row 1 of"),
        ("text", {}, "call", "returned str, not an iterable of mappings"),
        ("later", {}, "call", "returned coroutine, not an iterable"),
        ("dates", {}, "call", "'when' is datetime.date(2026, 1, 1), but json cannot hold"),
        ("empty", {}, "call", "has 0"),
        ("exits", {}, "call", "raised SystemExit: no licence ("),
        ("exits_among_rows", {}, "call", "raised SystemExit: 3 ("),
        ("interrupts", {}, "call", "raised KeyboardInterrupt ("),
        ("ends", {}, "call", "ended the process that it runs in (exit code 0)"),
        ("ends_among_rows", {}, "call", "ended the process that it runs in (exit code 5)"),
        ("crashes", {}, "call", "ended the process that it runs in (SIGSEGV)"),
        ("asks", {}, "call", "raised EOFError"),
        ("holds_itself", {}, "call", "nested more than 200 deep, or holds itself"),
    ],
)
def test_a_function_that_cannot_be_used_is_told_at_its_key(
    call: Any, name: str, settings: dict[str, Any], path: str, fact: str
) -> None:
    ((where, said),) = faults(call(name, **settings))
    assert where == path
    assert fact in said
    assert all(problem.fix for problem in call(name, **settings).problems(place))


@pytest.mark.parametrize("name", ["exits", "exits_among_rows", "holds_itself"])
def test_a_function_that_ends_the_run_is_told_at_a_load_too(call: Any, name: str) -> None:
    (problem,) = load_faults(call(name, columns={"prompt": "str"} if "exits" in name else None))
    assert problem.place.path == "call"
    assert problem.fix


def test_a_check_waits_for_a_function_for_a_limited_time(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.data.child.LIMIT", 0.8)
    (problem,) = call("sleeps").problems(place)
    assert "has not given its rows within 0.8 s" in problem.fact
    assert problem.fix.startswith("columns: {NAME: TYPE}")


def test_what_a_function_prints_is_no_part_of_its_rows(call: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert types(call("prints")) == {"prompt": "str"}
    assert capfd.readouterr() == ("", "reading\nmore")


def test_modules_and_names_without_a_function() -> None:
    for name in ("sums", "no_such_module:sums", "./no_such_file.py:sums", "not a name:f"):
        assert [path for path, _ in faults(Python(call=name))] == ["call"]


def test_an_endless_function_is_streamed_or_limited(call: Any) -> None:
    streamed = call("endless", streaming=True, buffer=8)
    assert faults(streamed, 500) == []
    rows = streamed.load()
    assert isinstance(rows, Streamed)
    assert rows.reaches(5000)
    assert rows[4999] == {"prompt": "4999"}
    assert len(call("endless", limit=10).load()) == 10


def test_what_a_streamed_function_raises_is_told_when_it_comes(call: Any) -> None:
    rows = call("breaks", args={"after": 150}, streaming=True).load(Loading(place=place))
    assert rows.reaches(150)
    with pytest.raises(PipelineError, match="raised KeyError"):
        rows.reaches(151)


def test_the_fingerprint_is_that_of_the_rows(call: Any) -> None:
    assert call("sums").fingerprint() == call("sums", args={"size": 3}).fingerprint()
    assert call("sums").fingerprint() != call("sums", args={"size": 4}).fingerprint()
