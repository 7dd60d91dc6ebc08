"""Metrics with declared reductions, and failures as values."""

from __future__ import annotations

import math

import pytest

from flowrl.metrics import Metric, Report, collect, failure, failure_of, merge, metric, replay


def test_outside_the_engine_reporting_does_nothing() -> None:
    metric("x", 1.0)
    failure(["u0_0_0"], ValueError("no"))
    with collect() as report:
        pass
    assert report == Report()


def test_a_mean_weighs_parts_by_their_size() -> None:
    with collect() as report:
        metric("loss", 6.0, 3)
        metric("loss", 8.0, 1)
    assert report.metrics["loss"].value == 3.5


@pytest.mark.parametrize(("reduce", "value"), [("sum", 7.0), ("max", 5.0), ("min", 2.0), ("last", 2.0)])
def test_other_reductions(reduce: str, value: float) -> None:
    with collect() as report:
        for total in (5.0, 2.0):
            metric("x", total, reduce=reduce)  # type: ignore[arg-type]
    assert report.metrics["x"].value == value


def test_a_mean_over_nothing_is_no_number() -> None:
    with collect() as report:
        metric("x", 0.0, 0)
    assert math.isnan(report.metrics["x"].value)


def test_one_name_has_one_reduction() -> None:
    with collect():
        metric("x", 1.0)
        with pytest.raises(ValueError, match="'x' is reduced by mean in one place and sum in another"):
            metric("x", 1.0, reduce="sum")


def test_numbers_of_any_kind_become_floats() -> None:
    import numpy as np

    with collect() as report:
        metric("x", np.float32(0.5), np.int64(2))  # type: ignore[arg-type]
    assert report.metrics["x"] == Metric("x", 0.5, 2.0, "mean")


def test_merging_ranks_is_like_one_rank_that_saw_it_all() -> None:
    ranks = [[Metric("loss", 6.0, 3, "mean")], [Metric("loss", 8.0, 1, "mean"), Metric("n", 1, 1, "sum")]]
    assert {name: part.value for name, part in merge(ranks).items()} == {"loss": 3.5, "n": 1}


def test_a_collection_can_go_on_and_ends_with_its_block() -> None:
    with collect() as report:
        metric("x", 1.0, reduce="sum")
    with collect(report):
        metric("x", 2.0, reduce="sum")
    metric("x", 4.0, reduce="sum")
    assert report.metrics["x"].value == 3.0


def test_nested_collections_do_not_mix() -> None:
    with collect() as outer:
        with collect() as inner:
            metric("x", 1.0)
        assert not outer.metrics
        replay(inner)
    assert outer.metrics["x"].value == 1.0


def test_a_failure_names_rows_error_and_where_it_was_raised() -> None:
    try:
        raise KeyError("answer")
    except KeyError as error:
        found = failure_of(["u0_1_0"], error)
        with collect() as report:
            failure(["u0_1_0"], error)
    assert (found.rows, found.error) == (("u0_1_0",), "KeyError: 'answer'")
    assert "test_metrics.py" in found.traceback
    assert report.failures == [found]
