"""Identity of trajectories and jagged arrays."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from flowrl.rows import Jagged, Rows, offsets_of


def test_rows_are_shown_by_group_session_and_output() -> None:
    rows = Rows(["u3", "u7"], group=[0, 1, 1], session=[0, 0, 1], output=[0, 0, 2])
    assert rows.names() == ["u3_0_0", "u7_0_0", "u7_1_2"]
    assert rows.keys() == [("u3", 0, 0), ("u7", 0, 0), ("u7", 1, 2)]


def test_rows_of_uids_number_the_sessions_of_each_group_by_appearance() -> None:
    rows = Rows.of(["b", "a", "b", "b"])
    assert rows.uids == ("b", "a")
    assert rows.names() == ["b_0_0", "a_0_0", "b_1_0", "b_2_0"]
    assert rows.planned.tolist() == rows.settled.tolist() == [3, 1]


def test_prompts_without_trajectories_have_groups_and_no_rows() -> None:
    rows = Rows(["u0", "u1"], planned=[4, 4], settled=[0, 0])
    assert len(rows) == 0
    assert rows.num_groups == 2
    assert len(rows.canonical_order()) == 0


def test_equality_looks_at_identity_and_order_alone() -> None:
    assert Rows.of(["a", "b"]) == Rows(["a", "b"], [0, 1], [0, 0], planned=[5, 5], settled=[1, 1])
    assert Rows.of(["a", "b"]) != Rows.of(["b", "a"])
    assert Rows.of(["a"]) != "a"


def test_rows_survive_pickling() -> None:
    rows = Rows(["a", "b"], [1, 0], [0, 3], planned=[4, 4], settled=[4, 2])
    again = pickle.loads(pickle.dumps(rows))
    assert again == rows
    assert again.settled.tolist() == [4, 2]


def test_canonical_order_is_by_uid_session_output() -> None:
    rows = Rows(["b", "a"], [0, 1, 0, 1, 0], [1, 0, 0, 0, 0], [0, 1, 1, 0, 0])
    assert rows.take(rows.canonical_order()).names() == ["a_0_0", "a_0_1", "b_0_0", "b_0_1", "b_1_0"]


def test_take_keeps_the_sizes_of_the_groups_that_are_left() -> None:
    rows = Rows(["a", "b", "c"], [0, 1, 1, 2], [0, 0, 1, 0], planned=[1, 4, 1], settled=[1, 3, 1])
    taken = rows.take(np.array([3, 2]))
    assert taken.names() == ["c_0_0", "b_1_0"]
    assert taken.uids == ("b", "c")
    assert (taken.planned.tolist(), taken.settled.tolist()) == ([4, 1], [3, 1])


def test_take_groups_keeps_groups_without_trajectories() -> None:
    rows = Rows(["a", "b", "c"], [0, 2, 0], [0, 0, 1], planned=[2, 2, 2], settled=[2, 2, 1])
    taken, index = rows.take_groups(np.array([2, 1]))
    assert taken.uids == ("c", "b")
    assert taken.names() == ["c_0_0"]
    assert index.tolist() == [1]


def test_concat_joins_a_group_that_lies_in_two_blocks() -> None:
    first = Rows(["a", "b"], [0, 1], [0, 0], planned=[2, 2], settled=[1, 2])
    second = Rows(["b", "a"], [1, 0], [1, 1], planned=[2, 2], settled=[2, 2])
    rows = Rows.concat([first, second])
    assert rows.uids == ("a", "b")
    assert rows.names() == ["a_0_0", "b_0_0", "a_1_0", "b_1_0"]
    assert rows.settled.tolist() == [2, 2]


def test_a_session_too_few_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="one session and output"):
        Rows(["a"], [0, 0], [0])


def test_jagged_rows_are_slices_of_one_array() -> None:
    jagged = Jagged.of([[1, 2], [], [3]])
    assert [row.tolist() for row in jagged] == [[1, 2], [], [3]]
    assert jagged.lengths.tolist() == [2, 0, 1]
    assert jagged.row.tolist() == [0, 0, 2]
    assert len(jagged) == 3


def test_an_empty_first_row_does_not_decide_the_type() -> None:
    assert Jagged.of([[], [1, 2]]).values.dtype == np.int64
    assert Jagged.of([[], [True]]).values.dtype == np.bool_
    assert Jagged.of([], np.int64).values.dtype == np.int64


def test_padding_fills_the_end_of_shorter_rows() -> None:
    assert Jagged.of([[1, 2], [], [3]]).padded(-1).tolist() == [[1, 2], [-1, -1], [3, -1]]
    assert Jagged.of([], np.int64).padded().shape == (0, 0)


def test_jagged_take_copies_rows_in_any_order_and_more_than_once() -> None:
    taken = Jagged.of([[1, 2], [], [3]]).take(np.array([2, 0, 0, 1]))
    assert [row.tolist() for row in taken] == [[3], [1, 2], [1, 2], []]


def test_jagged_concat_works_on_views_into_a_larger_array() -> None:
    whole = Jagged.of([[1, 2], [3], [4, 5]])
    view = Jagged(whole.values, whole.offsets[1:])
    joined = Jagged.concat([view, Jagged.of([[6]])])
    assert [row.tolist() for row in joined] == [[3], [4, 5], [6]]
    assert view.padded().tolist() == [[3, 0], [4, 5]]


def test_offsets_start_at_zero() -> None:
    assert offsets_of([2, 0, 1]).tolist() == [0, 2, 2, 3]
    assert offsets_of([]).tolist() == [0]
