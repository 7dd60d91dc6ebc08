"""Metrics of a step, and where its time went."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.engine.call import Receipt
from flowrl.engine.tally import Tally, covered
from flowrl.errors import RunError
from flowrl.metrics import Failure, Metric
from flowrl.rows import Rows

START = 1_000_000.0


def receipt(node: str, start: float, end: float, **rest: Any) -> Receipt:
    return Receipt(node, 1, 1, "cpu/0", Rows(()), (), START + start, START + end, 0, 0, **rest)


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """Of a step that has lasted ten seconds when its metrics are asked for."""
    clock = iter([START, START + 10.0])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    return Tally(1)


def test_engine_time_is_wall_time_without_the_union_of_all_nodes(tally: Tally) -> None:
    for node, start, end in (("a", 1, 4), ("b", 3, 5), ("b", 4, 6), ("c", 7, 8)):
        tally.add(receipt(node, start, end))
    metrics = tally.metrics()
    assert metrics["time/step"] == 10.0
    assert metrics["time/engine"] == 10.0 - 5.0 - 1.0
    assert {name: metrics[f"time/{name}"] for name in "abc"} == {"a": 3.0, "b": 3.0, "c": 1.0}


def test_training_waits_while_nothing_behind_the_front_runs(tally: Tally) -> None:
    for node, start, end in (("rollout", -2, 6), ("reward", 6, 7), ("update", 5, 8), ("sync", 8, 8.5)):
        tally.add(receipt(node, start, end))
    assert tally.metrics(front={"rollout", "reward"})["time/wait_for_samples"] == 10.0 - 3.0 - 0.5


def test_a_node_that_overlaps_itself_is_not_counted_twice(tally: Tally) -> None:
    tally.add(receipt("a", 0, 6))
    tally.add(receipt("a", 2, 4))
    assert tally.metrics()["time/a"] == 6.0


def test_of_what_began_before_the_step_or_goes_on_after_it_the_part_in_it_counts(tally: Tally) -> None:
    tally.add(receipt("rollout", -8, 3))
    tally.add(receipt("reward", -2, -1))
    metrics = tally.metrics(unended=[("rollout", START + 9), ("judge", START + 8)])
    assert {name: metrics[f"time/{name}"] for name in ("rollout", "reward", "judge")} == {
        "rollout": 4.0, "reward": 0.0, "judge": 2.0,
    }  # fmt: skip
    assert metrics["time/engine"] == 10.0 - 3.0 - 2.0


def test_metrics_of_all_receipts_are_merged_by_their_reduction(tally: Tally) -> None:
    tally.add(
        receipt("a", 0, 1, metrics=(Metric("reward/mean", 3.0, 4, "mean"), Metric("rollout/tokens", 30, 1, "sum")))
    )
    tally.add(
        receipt("a", 1, 2, metrics=(Metric("reward/mean", 3.0, 2, "mean"), Metric("rollout/tokens", 70, 1, "sum")))
    )
    metrics = tally.metrics()
    assert metrics["reward/mean"] == 1.0
    assert metrics["throughput/tokens_per_s"] == 10.0


def test_failed_rows_are_counted_and_a_failure_without_rows_is_one(tally: Tally) -> None:
    tally.add(receipt("a", 0, 1, failures=(Failure(("u0_0_0", "u0_1_0"), "x"), Failure((), "y"))))
    assert tally.metrics()["rows/failed"] == 3.0


def test_staleness_is_how_far_what_generated_lags_behind_the_step() -> None:
    tally = Tally(3, {"a": 9})
    versions = (
        Metric("rollout/policy_version/mean", 34.0, 4, "mean"),
        Metric("rollout/policy_version/min", 7, 1, "min"),
    )
    tally.add(receipt("a", 0, 1, metrics=versions))
    metrics = tally.metrics()
    assert metrics["staleness/mean"] == 0.5
    assert metrics["staleness/max"] == 2


def test_staleness_is_that_of_the_trained_tokens_where_the_update_reads_their_versions() -> None:
    tally = Tally(3, {"actor": 9, "rollout": 9})
    for node, total, weight, oldest in (("actor", 15.0, 2, 7), ("rollout", 36.0, 4, 9)):
        mean = Metric(f"{node}/policy_version/mean", total, weight, "mean")
        tally.add(receipt(node, 0, 1, metrics=(mean, Metric(f"{node}/policy_version/min", oldest, 1, "min"))))
    metrics = tally.metrics()
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (1.5, 2)


def test_each_model_has_a_version_of_its_own_for_its_tokens_to_lag_behind() -> None:
    tally = Tally(12, {"update": 11, "update_late": 2})
    for node, total, oldest in (("update", 31.0, 10), ("update_late", 6.0, 2)):
        mean = Metric("actor/policy_version/mean", total, 3, "mean")
        tally.add(receipt(node, 0, 1, metrics=(mean, Metric("actor/policy_version/min", oldest, 1, "min"))))
    metrics = tally.metrics()
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2 / 6, 1)


@pytest.mark.parametrize("name", ["time/step", "time/a", "step", "rows/failed", "throughput/tokens_per_s"])
def test_a_node_that_reports_a_metric_of_the_engines_ends_the_run(tally: Tally, name: str) -> None:
    metrics = (Metric(name, 1.0, 1.0, "mean"), Metric("rollout/tokens", 1, 1, "sum"))
    tally.add(receipt("a", 0, 1, metrics=metrics))
    with pytest.raises(RunError, match=f"a node reports the metric '{name}', which the engine measures"):
        tally.metrics()


def test_without_any_node_all_of_the_step_is_the_engine(tally: Tally) -> None:
    waited = {"time/engine": 10.0, "time/wait_for_samples": 10.0}
    assert tally.metrics() == {"time/step": 10.0, **waited, "rows/failed": 0.0}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (min(pair), max(pair)))))
def test_covered_time_is_that_of_every_second_once(intervals: list[tuple[int, int]]) -> None:
    seconds = {second for start, end in intervals for second in range(start, end)}
    assert covered([(float(start), float(end)) for start, end in intervals]) == len(seconds)
