"""pass@k and the vote of the majority, by hand and against counting every way to draw."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.nodes._backend.estimates import majority, pass_at_k, powers_of_two


@pytest.mark.parametrize(
    ("num", "right", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (4, 2, 2, 5 / 6),
        (5, 2, 4, 1.0),  # four of five cannot miss both
        (4, 0, 4, 0.0),
        (1, 1, 1, 1.0),
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_by_hand(num: int, right: int, k: int, expected: float) -> None:
    assert pass_at_k(num, right, k) == pytest.approx(expected, abs=1e-15)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_success(right: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(right)))
    draws = list(combinations(right, k))
    assert pass_at_k(len(right), sum(right), k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


@given(st.integers(2, 400), st.data())
def test_pass_at_k_grows_with_k_and_with_successes(num: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, num - 1)), data.draw(st.integers(1, num - 1))
    here = pass_at_k(num, right, k)
    assert 0.0 <= here <= 1.0
    assert here <= pass_at_k(num, right, k + 1)
    assert here <= pass_at_k(num, right + 1, k)


def test_k_runs_over_the_powers_of_two_up_to_n() -> None:
    assert [powers_of_two(num) for num in (1, 2, 3, 4, 7, 8)] == [
        [1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4], [1, 2, 4, 8],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        (["4", "4", "5"], [True, True, False], 1.0),
        (["4", "5", "5"], [True, False, False], 0.0),
        (["4", "5"], [True, False], 0.5),  # a tie is drawn by lot
        (["4", "5", "6"], [True, False, False], 1 / 3),
        (["4", "4", "5", "5", "6"], [True, True, False, False, True], 0.5),
        (["4", None, None, None], [True, False, False, False], 1.0),  # no answer, no vote
        ([None, None], [True, False], 0.0),
        (["4", "4"], [True, False], 0.5),  # one answer, judged in two ways
        ([], [], 0.0),
    ],
)
def test_majority_by_hand(answers: list[str | None], right: list[bool], expected: float) -> None:
    assert majority(answers, right) == pytest.approx(expected)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=8))
def test_the_order_of_samples_means_nothing(votes: list[tuple[str, bool]]) -> None:
    turned = list(reversed(votes))
    assert majority(*map(list, zip(*votes, strict=True))) == pytest.approx(  # type: ignore[arg-type]
        majority(*map(list, zip(*turned, strict=True)))  # type: ignore[arg-type]
    )
