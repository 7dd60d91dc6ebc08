"""Splitting rows over ranks and micro-batches: hand-worked plans and the invariants every plan keeps."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.nodes._backend.partition import micro_batches, plan_micro_batches, shards

COSTS = st.lists(st.integers(0, 50), max_size=24).map(lambda costs: np.array(costs, dtype=np.int64))
LIMIT = st.none() | st.integers(1, 80)


def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_shards_put_the_dearest_row_on_the_least_loaded_rank() -> None:
    # 9 -> rank 0 (9), 7 -> 1 (7), 5 -> 1 (12), 3 -> 0 (12), 2 -> a tie in cost and rows, so rank 0 (14).
    assert shards(np.array([3, 9, 2, 7, 5]), 2).tolist() == [0, 0, 0, 1, 1]


def test_shards_fall_back_on_row_counts_where_costs_do_not_tell() -> None:
    assert shards(np.zeros(5, dtype=np.int64), 2).tolist() == [0, 1, 0, 1, 0]


def test_micro_batches_bound_rows() -> None:
    # Dearest first: 9, 7, 5, 3, 2 at positions 1, 3, 4, 0, 2.
    assert as_lists(micro_batches(np.array([3, 9, 2, 7, 5]), max_rows=2)) == [[1, 3], [4, 0], [2]]


def test_micro_batches_bound_padded_tokens() -> None:
    # 14 // 9 = 1 row; 14 // 7 = 2 rows (7 and 5, 14 padded); 14 // 3 = 4, of which 2 are left.
    assert as_lists(micro_batches(np.array([3, 9, 2, 7, 5]), max_tokens=14)) == [[1], [3, 4], [0, 2]]


def test_a_row_over_the_limit_stands_alone() -> None:
    assert as_lists(micro_batches(np.array([20, 4, 4]), max_tokens=8)) == [[0], [1, 2]]


def test_without_limits_all_rows_are_one_micro_batch() -> None:
    assert as_lists(micro_batches(np.array([1, 2, 3]))) == [[2, 1, 0]]


def test_more_batches_than_needed_halve_the_dearest() -> None:
    # [4, 3, 2, 1] -> [4, 3] [2, 1] -> [4] [3] [2, 1]
    assert as_lists(micro_batches(np.array([4, 3, 2, 1]), num_batches=3)) == [[0], [1], [2, 3]]


def test_a_rank_with_too_few_rows_repeats_a_real_row_excluded() -> None:
    # Rank 0 holds row 0 (cost 10); rank 1 the other three (3 each), one row per micro-batch.
    costs = np.array([10, 3, 3, 3])
    first = plan_micro_batches(costs, 2, 0, max_rows=1)
    second = plan_micro_batches(costs, 2, 1, max_rows=1)
    assert [(batch.rows.tolist(), batch.excluded) for batch in first] == [([0], False), ([0], True), ([0], True)]
    assert [(batch.rows.tolist(), batch.excluded) for batch in second] == [([1], False), ([2], False), ([3], False)]


def test_a_rank_with_fewer_micro_batches_splits_finer_before_it_repeats() -> None:
    # Rank 0: row 0 of 8 tokens, and row 3; rank 1: rows 1 and 2. At most 8 padded tokens: [0] [3] against [1, 2].
    costs = np.array([8, 4, 4, 1])
    plans = [plan_micro_batches(costs, 2, rank, max_tokens=8) for rank in range(2)]
    assert [[batch.rows.tolist() for batch in plan] for plan in plans] == [[[0], [3]], [[1], [2]]]
    assert not any(batch.excluded for plan in plans for batch in plan)


def test_no_rows_need_no_plan() -> None:
    assert plan_micro_batches(np.zeros(0, dtype=np.int64), 2, 0) == []


@given(costs=COSTS, num_ranks=st.integers(1, 6))
def test_shards_are_balanced_and_leave_no_rank_empty(costs: np.ndarray, num_ranks: int) -> None:
    rank_of = shards(costs, num_ranks)
    load = np.bincount(rank_of, costs, num_ranks)
    assert load.max() - load.min() <= costs.max(initial=0)
    if len(costs) >= num_ranks:
        assert set(rank_of.tolist()) == set(range(num_ranks))


@given(costs=COSTS, max_tokens=LIMIT, max_rows=LIMIT, num_batches=st.none() | st.integers(1, 30))
def test_micro_batches_hold_each_row_once_within_the_limits(
    costs: np.ndarray, max_tokens: int | None, max_rows: int | None, num_batches: int | None
) -> None:
    batches = micro_batches(costs, max_tokens, max_rows, num_batches)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(costs)))
    for batch in batches:
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or len(batch) == 1 or len(batch) * costs[batch].max() <= max_tokens
    assert len(batches) >= min(num_batches or 0, len(costs))


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@given(costs=COSTS, max_tokens=LIMIT, max_rows=LIMIT)
def test_all_ranks_run_as_many_micro_batches_and_train_each_row_once(
    num_ranks: int, costs: np.ndarray, max_tokens: int | None, max_rows: int | None
) -> None:
    plans = [plan_micro_batches(costs, num_ranks, rank, max_tokens, max_rows) for rank in range(num_ranks)]
    assert len({len(plan) for plan in plans}) == 1
    batches = [batch for plan in plans for batch in plan]
    trained = [row for batch in batches if not batch.excluded for row in batch.rows.tolist()]
    assert sorted(trained) == list(range(len(costs)))
    assert all(len(batch.rows) > 0 and batch.rows.max() < len(costs) for batch in batches)
