"""Columns: construction, arithmetic, broadcasting, reduction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrl.batch import Json, Prompt, PromptToken, Sample, Step, Token
from flowrl.rows import Rows

ROWS = Rows.of(["a", "b", "a"])


def test_a_missing_float_reads_as_nan() -> None:
    column = Sample[float](ROWS, [1.0, None, 2])  # type: ignore[list-item]
    assert np.isnan(column.values[1])
    assert column.cast("float").values.dtype == np.float32


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (["1.5", "2", "3"], "float"),
        ([1, "2", 3], "int"),
        ([1.5, 2, 3], "int"),
        ([1, None, 3], "int"),
        ([True, None, False], "bool"),
        ([0, 2, 1], "bool"),
        ([{}, {}, {}], "float"),
    ],
)
def test_a_value_that_the_type_cannot_hold_is_refused_not_guessed(values: list[Any], dtype: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{dtype} cannot hold"):
        Sample(ROWS, values).cast(dtype)


def test_numbers_that_fit_are_converted() -> None:
    assert Sample(ROWS, [1.0, 2.0, 3.0]).cast("int").values.tolist() == [1, 2, 3]
    assert Sample(ROWS, [0, 1, 1]).cast("bool").values.tolist() == [False, True, True]
    assert Sample(ROWS, [True, False, True]).cast("float").values.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("values", [[[1, 2], [3, 4], [5, 6]], [1, {"a": 1}, None], [None, "x", [1]], [1, "x", True]])
def test_json_values_stay_what_they_are(values: list[Any]) -> None:
    assert list(Sample[Json](ROWS, values).cast("json")) == values


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([None, "x", "y"], "null"),
        ([None] * 3, "null"),
        (["x", 1, "y"], "1"),
        ([1, 2, 3], "1"),
        (["x", b"y", "z"], "b'y'"),
    ],
)
def test_text_has_no_null_and_nothing_else_becomes_text(values: list[Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"str cannot hold {said}"):
        Sample[Any](ROWS, values).cast("str")


def test_json_values_become_native() -> None:
    values = [{1: np.float32(0.5)}, np.array([1, 2]), float("nan")]
    assert list(Sample[Json](ROWS, values).cast("json")) == [{"1": 0.5}, [1, 2], None]


def test_what_json_has_no_form_for_is_refused_also_deep_inside() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value, said in ((int, "<class 'int'>"), (b"x", "b'x'"), (1j, "1j"), (endless, "a value that holds itself")):
        with pytest.raises((TypeError, ValueError), match=f"json cannot hold {said}"):
            Sample[Json](ROWS, ["x", {"a": [value]}, None]).cast("json")


def test_a_step_holds_one_value_of_any_kind() -> None:
    assert Step(ROWS, 0.5).value == 0.5
    assert Step[Json](ROWS, [1, 2]).cast("json").value == [1, 2]
    assert Step(ROWS, "text").cast("str").value == "text"


def test_a_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="Sample needs 3 values, got 2"):
        Sample(ROWS, [1.0, 2.0])
    with pytest.raises(ValueError, match="Prompt needs 2 values, got 3"):
        Prompt(ROWS, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="Token needs 4 offsets"):
        Token(ROWS, [1, 2], np.array([0, 1, 2]))
    with pytest.raises(ValueError, match="one prompt index for each of 3"):
        PromptToken.of(ROWS, [[1]], [0, 0])
    with pytest.raises(ValueError, match="flat array"):
        Sample(ROWS, np.zeros((3, 1)))


def test_arithmetic_is_element_wise_with_columns_and_numbers() -> None:
    column = Sample(ROWS, np.array([1.0, 2.0, 4.0]))
    assert ((column + column) / 2 - 1).values.tolist() == [0.0, 1.0, 3.0]
    assert (1 - column).values.tolist() == [0.0, -1.0, -3.0]
    assert (8 / column).values.tolist() == [8.0, 4.0, 2.0]
    assert (2 * -column).values.tolist() == [-2.0, -4.0, -8.0]
    assert (1 + column).values.tolist() == [2.0, 3.0, 5.0]


def test_comparison_and_logic_give_masks() -> None:
    column = Sample(ROWS, np.array([1.0, 2.0, 4.0]))
    assert (column > 1).values.tolist() == (column >= 2).values.tolist() == [False, True, True]
    assert ((column < 4) & (column != 1)).values.tolist() == [False, True, False]
    assert (~(column <= 1) | (column == 1)).values.tolist() == [True, True, True]


def test_columns_of_different_axes_do_not_mix() -> None:
    token = Token.of(ROWS, [[1.0], [2.0], [3.0]])
    with pytest.raises(TypeError, match=r"per_token|per_sample"):
        _ = Sample(ROWS, [1.0, 2.0, 3.0]) + token


def test_columns_of_different_rows_do_not_mix() -> None:
    column = Sample(ROWS, [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="join them by identity"):
        _ = column + Sample(Rows.of(["a", "a", "b"]), [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="join them by identity"):
        column.per_token(Token.of(Rows.of(["a", "a", "b"]), [[1], [1], [1]]))
    with pytest.raises(ValueError, match="different length"):
        _ = Token.of(ROWS, [[1], [2, 3], []]) + Token.of(ROWS, [[1], [2], [3]])


def test_a_prompt_value_reaches_its_samples_by_uid() -> None:
    answers = Prompt(Rows(["b", "c", "a"]), ["B", "C", "A"])
    assert list(answers.per_sample(Sample(ROWS, [0, 0, 0]))) == ["A", "B", "A"]
    with pytest.raises(ValueError, match="no value for group b"):
        Prompt(Rows(["a"]), ["A"]).per_sample(Sample(ROWS, [0, 0, 0]))


def test_token_sums_count_a_mask_and_are_zero_for_an_empty_response() -> None:
    mask = Token.of(ROWS, [[True, False, True], [], [True]], "bool")
    assert mask.sum("sample").values.tolist() == [2, 0, 1]
    assert mask.sum("sample").values.dtype == np.int64
    assert Token.of(ROWS, [[0.5, 0.25], [], [1.0]]).sum().values.tolist() == [0.75, 0.0, 1.0]


def test_token_mean_of_an_empty_response_is_missing() -> None:
    mean = Token.of(ROWS, [[1.0, 3.0], [], [1.0]]).mean("sample").values
    assert mean[[0, 2]].tolist() == [2.0, 1.0]
    assert np.isnan(mean[1])


def test_group_means_leave_out_missing_values() -> None:
    mean = Sample(Rows.of(["a", "b", "a", "b"]), np.array([1.0, np.nan, 3.0, np.nan])).mean("prompt")
    assert mean.values[0] == 2.0
    assert np.isnan(mean.values[1])
    assert Sample(ROWS, np.array([1.0, 2.0, 4.0])).sum("prompt").values.tolist() == [5.0, 2.0]


def test_distinct_prompts_are_stored_once_and_read_as_if_repeated() -> None:
    column = PromptToken[int].of(ROWS, [[7, 8], [9]])
    assert column.values.tolist() == [7, 8, 9]
    assert [row.tolist() for row in column.jagged] == [[7, 8], [9], [7, 8]]
    assert column.lengths.tolist() == [2, 1, 2]


def test_a_tensor_shares_the_memory_of_its_column() -> None:
    column = Sample(ROWS, np.array([1.0, 2.0, 3.0], dtype=np.float32))
    column.values.flags.writeable = False
    assert column.torch().numpy().ctypes.data == column.values.ctypes.data


def test_padding_is_for_kernels() -> None:
    assert Token.of(ROWS, [[1, 2], [], [3]]).padded(9).tolist() == [[1, 2], [9, 9], [3, 9]]
