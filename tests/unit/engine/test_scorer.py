"""Rows scored in a process that is killed when one of them never ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stub_nodes import stub

from flowrl.batch import Batch, Sample
from flowrl.engine.scorer import Scorer
from flowrl.fields import FieldType
from flowrl.metrics import Report, collect
from flowrl.node import Context
from flowrl.rows import Rows

ROWS = Rows.of(["a", "a", "b", "b", "c", "c"])
BAD = "b_0_0"


def inputs(rows: Rows = ROWS) -> Batch:
    return Batch(rows, {"response": Sample(rows, rows.names())}, {"response": FieldType("Sample", "str")})


def descendants() -> set[int]:
    """Processes below this one that serve to score: children of the fork server, which itself stays for the next."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(status.parent.name)] = int(fields[1])
    helpers = {pid for pid, parent in parents.items() if parent == os.getpid()}
    return {pid for pid, parent in parents.items() if parent in helpers}


@contextmanager
def scorer(**settings: Any) -> Iterator[Scorer]:
    """A scorer that has left no process behind."""
    before = descendants()
    made = Scorer(stub("judge", "Judge", **{"on_error": "unscored", **settings}), Context(), can_kill=True)
    try:
        yield made
    finally:
        made.close()
    deadline = time.monotonic() + 2
    while descendants() - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert descendants() <= before


def score(made: Scorer, batch: Batch | None = None) -> tuple[dict[str, float], Report]:
    with collect() as report:
        (column,) = made.score(batch or inputs())
    return dict(zip(column.rows.names(), column.values.tolist(), strict=True)), report


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("raise", "ZeroDivisionError: nothing to divide"),
        ("text", "TypeError: float cannot hold '1.5'"),
        ("exit", "SystemExit: 3"),
        ("interrupt", "KeyboardInterrupt: "),
        ("cancel", "CancelledError: "),
        ("mute", "Mute: its message cannot be shown (ZeroDivisionError)"),
        ("die", "RuntimeError: the scoring process died"),
        ("infinity", "ValueError: it wrote inf to 'score', and infinity is no score"),
        ("loop", "TimeoutError: no answer within 0.5 s"),
        ("power", "TimeoutError: no answer within 0.5 s"),
        ("sleep", "TimeoutError: no answer within 0.5 s"),
    ],
)
def test_a_bad_row_is_unscored_and_named_and_hurts_no_other(how: str, error: str) -> None:
    with scorer(bad=BAD, how=how, timeout=0.5) as made:
        start = time.monotonic()
        values, report = score(made)
        took = time.monotonic() - start
        assert np.isnan(values.pop(BAD))
        assert values == dict.fromkeys(values, 5.0)
        assert len(values) == 5
        (failure,) = report.failures
        assert failure.rows == (BAD,)
        assert failure.error.startswith(error)
        assert took < 10
        again, report = score(made, inputs(Rows.of(["z"])))
        assert again == {"z_0_0": 5.0}
        assert not report.failures


@pytest.mark.parametrize("how", ["none", "nan"])
def test_a_row_may_stay_without_a_value_without_being_a_failure(how: str) -> None:
    with scorer(bad=BAD, how=how) as made:
        values, report = score(made)
        assert np.isnan(values[BAD])
        assert report.failures == []
        assert report.metrics["judge/seen"].value == 6


@pytest.mark.parametrize("can_kill", [True, False])
def test_the_blocks_of_a_stream_are_joined_row_by_row(can_kill: bool) -> None:
    made = Scorer(stub("judge", "StreamJudge", on_error="unscored", empty=True), Context(), can_kill)
    try:
        values, report = score(made)
        assert values == dict.fromkeys(ROWS.names(), 5.0)
        assert not report.failures
    finally:
        made.close()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"times": 0}, "ValueError: it wrote 0 values to 'score' for one row"),
        ({"times": 2}, "ValueError: it wrote 2 values to 'score' for one row"),
        ({"how": "bare"}, "TypeError: it returned Sample, not its Out"),
        ({"how": "axis"}, "TypeError: it wrote 'score' as Prompt, not as Sample[float]"),
    ],
)
def test_a_stream_that_is_not_what_its_out_says_leaves_the_row_unscored(settings: Any, error: str) -> None:
    made = Scorer(stub("judge", "StreamJudge", on_error="unscored", **settings), Context(), can_kill=False)
    values, report = score(made)
    assert np.isnan(list(values.values())).all()
    assert {failure.error for failure in report.failures} == {error}
    assert [failure.rows for failure in report.failures] == [(name,) for name in ROWS.names()]


def test_many_rows_are_sent_in_growing_chunks() -> None:
    rows = Rows.of([f"u{index}" for index in range(300)])
    with scorer() as made:
        start = time.monotonic()
        values, report = score(made, inputs(rows))
        assert time.monotonic() - start < 5
        assert list(values) == rows.names()
        assert list(values.values()) == [float(len(name)) for name in rows.names()]
        assert report.metrics["judge/seen"].value == 300


def test_no_rows_give_an_empty_column() -> None:
    with scorer() as made:
        assert score(made, inputs(Rows(()))) == ({}, Report())


def test_a_node_that_cannot_be_set_up_says_so_and_leaves_no_process() -> None:
    before = descendants()
    with pytest.raises(Exception, match="no model here"), scorer(how="setup"):
        pass
    time.sleep(0.2)
    assert descendants() <= before
