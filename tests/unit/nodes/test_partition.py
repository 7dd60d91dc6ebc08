"""Splitting rows over ranks and micro-batches: hand-worked plans and the invariants every plan keeps."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.partition import Prompts, micro_batches, plan_micro_batches, shards, tokens_of

COSTS = st.lists(st.integers(0, 50), max_size=24).map(lambda costs: np.array(costs, dtype=np.int64))
LIMIT = st.none() | st.integers(1, 80)


def as_lists(batches: list[np.ndarray]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def test_shards_put_the_dearest_row_on_the_least_loaded_rank() -> None:
    # 9 -> rank 0 (9), 7 -> 1 (7), 5 -> 1 (12), 3 -> 0 (12), 2 -> a tie in cost and rows, so rank 0 (14).
    assert shards(np.array([3, 9, 2, 7, 5]), 2).tolist() == [0, 0, 0, 1, 1]


def test_shards_fall_back_on_row_counts_where_costs_do_not_tell() -> None:
    assert shards(np.zeros(5, dtype=np.int64), 2).tolist() == [0, 1, 0, 1, 0]


def test_rows_of_one_prompt_stay_on_a_rank_where_that_is_not_dearer() -> None:
    # Four prompts of 100 tokens, two rows each: by row each rank would read all four.
    prompts = Prompts(np.full(8, 100), np.repeat(np.arange(4), 2))
    assert shards(np.full(8, 110), 2, prompts).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    # Here one group would keep its rank busy for 1,800 tokens while the other has 20 to read.
    prompts = Prompts(np.full(4, 5), np.array([0, 0, 1, 1]))
    assert shards(np.array([905, 905, 10, 10]), 2, prompts).tolist() == [0, 1, 0, 1]


def test_micro_batches_bound_rows() -> None:
    # Dearest first: 9, 7, 5, 3, 2 at positions 1, 3, 4, 0, 2. Three batches at least; 18 + 5 + 6 padded tokens are
    # fewer than 18 + 10 + 2, and as many as 9 + 14 + 6, which fills later.
    assert as_lists(micro_batches(np.array([3, 9, 2, 7, 5]), max_rows=2)) == [[1, 3], [4], [0, 2]]


def test_micro_batches_bound_padded_tokens() -> None:
    # 1,600 // 800 = 2 rows; 1,600 // 500 = 3, of which 2 are left. A pass costs 1,600 / 32 = 50 tokens.
    assert as_lists(micro_batches(np.array([490, 780, 500, 800]), max_tokens=1600)) == [[3, 1], [2, 0]]


def test_a_pass_is_taken_where_it_saves_more_padding_than_it_costs() -> None:
    # 3 x 900 padded tokens, or 2 x 900 + 850 and another pass for 100: that saves 50 and costs 3,200 / 32.
    assert as_lists(micro_batches(np.array([850, 900, 900]), max_tokens=3200)) == [[1, 2, 0]]
    assert as_lists(micro_batches(np.array([750, 900, 900]), max_tokens=3200)) == [[1, 2], [0]]


def test_rows_of_a_micro_batch_read_their_prompt_once() -> None:
    # Prompts of 1,000 tokens, two rows each; responses of 10 and 12: 1,000 + 2 x 12 tokens by prompt.
    prompts = Prompts(np.full(4, 1000), np.array([0, 1, 0, 1]))
    costs = 1000 + np.array([12, 10, 10, 12])
    assert as_lists(micro_batches(costs, max_tokens=1100, prompts=prompts)) == [[0, 2], [3, 1]]
    assert as_lists(micro_batches(costs, max_tokens=2100, prompts=prompts)) == [[0, 3, 2, 1]]


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


@st.composite
def rows_with_prompts(draw: st.DrawFn, most: int = 24) -> tuple[np.ndarray, Prompts]:
    """Costs of rows, and their prompts."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    same = np.array(draw(st.lists(st.integers(0, len(lengths) - 1), max_size=most)), dtype=np.int64)
    own = np.array(draw(st.lists(st.integers(0, 50), min_size=len(same), max_size=len(same))), dtype=np.int64)
    prompts = Prompts(np.array(lengths)[same], same)
    return own + prompts.lengths, prompts._replace(packed=draw(st.booleans()))


@given(rows=rows_with_prompts(), max_tokens=LIMIT, max_rows=LIMIT, num_batches=st.none() | st.integers(1, 30))
def test_micro_batches_hold_each_row_once_within_the_limits(
    rows: tuple[np.ndarray, Prompts], max_tokens: int | None, max_rows: int | None, num_batches: int | None
) -> None:
    costs, prompts = rows
    batches = micro_batches(costs, max_tokens, max_rows, num_batches, prompts)
    assert sorted(row for batch in batches for row in batch.tolist()) == list(range(len(costs)))
    for batch in batches:
        assert max_rows is None or len(batch) <= max_rows
        assert max_tokens is None or len(batch) == 1 or tokens_of(batch, costs, prompts) <= max_tokens
    assert len(batches) >= min(num_batches or 0, len(costs))


@given(rows=rows_with_prompts(most=8), max_tokens=st.integers(1, 300))
def test_no_other_cut_of_the_sorted_rows_costs_less(rows: tuple[np.ndarray, Prompts], max_tokens: int) -> None:
    costs, prompts = rows
    own, a_pass = costs - prompts.lengths, max(1, max_tokens // 32)

    def total(batches: list[np.ndarray]) -> float:
        tokens = [tokens_of(batch, costs, prompts) for batch in batches]
        fits = all(len(batch) == 1 or num <= max_tokens for batch, num in zip(batches, tokens, strict=True))
        return sum(tokens) + a_pass * len(tokens) if fits else float("inf")

    order = np.lexsort((prompts.same, -prompts.lengths, -own))
    places = range(1, len(order))
    every = (np.split(order, cut) for size in range(len(order)) for cut in itertools.combinations(places, size))
    most = len(own) * own.max(initial=0) + len(np.unique(prompts.same)) * prompts.lengths.max(initial=0)
    best = min((total(batches) for batches in every), default=0)
    # Where no limit is near, equal rows are kept together without a look at their prompts.
    slack = 0 if most > max_tokens else prompts.lengths.max(initial=0) * len(order)
    assert total(micro_batches(costs, max_tokens, prompts=prompts)) <= best + slack if len(costs) else True


def test_log_normal_lengths_waste_little() -> None:
    generator = np.random.default_rng(0)
    for num_rows in (32, 128, 512):
        costs = generator.lognormal(np.log(128) - 0.5, 1.0, num_rows).astype(np.int64) + 1
        batches = micro_batches(costs, max_tokens=8192)
        padded = sum(len(batch) * costs[batch].max() for batch in batches)
        assert padded < 1.25 * costs.sum() < 0.4 * num_rows * costs.max()


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@given(rows=rows_with_prompts(), max_tokens=LIMIT, max_rows=LIMIT)
def test_all_ranks_run_as_many_micro_batches_and_train_each_row_once(
    num_ranks: int, rows: tuple[np.ndarray, Prompts], max_tokens: int | None, max_rows: int | None
) -> None:
    costs, prompts = rows
    plans = [plan_micro_batches(costs, num_ranks, rank, max_tokens, max_rows, prompts) for rank in range(num_ranks)]
    rank_of = shards(costs, num_ranks, prompts)
    for rank, plan in enumerate(plans):
        own = [row for batch in plan if not batch.excluded for row in batch.rows.tolist()]
        assert sorted(own) == np.flatnonzero(rank_of == rank).tolist()
    assert len({len(plan) for plan in plans}) == 1
    batches = [batch for plan in plans for batch in plan]
    trained = [row for batch in batches if not batch.excluded for row in batch.rows.tolist()]
    assert sorted(trained) == list(range(len(costs)))
    assert all(len(batch.rows) > 0 and batch.rows.max() < len(costs) for batch in batches)
