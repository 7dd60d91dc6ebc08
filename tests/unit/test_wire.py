"""Batches as Arrow tables."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from flowrl.batch import Batch, Prompt, PromptToken, Sample, Step, Token
from flowrl.fields import FieldType
from flowrl.rows import Rows
from flowrl.wire import from_arrow, to_arrow

ROWS = Rows(["u1", "u0"], [0, 1, 1], [0, 0, 1], planned=[2, 2], settled=[1, 2])


def example() -> Batch:
    columns = {
        "reward": Sample(ROWS, np.array([1.0, np.nan, 0.5], dtype=np.float32)),
        "answer": Prompt(ROWS, ["one", "zwölf"]),
        "ids": PromptToken[int].of(ROWS, [[1, 2], [3]]),
        "log_probs": Token.of(ROWS, [[-0.5], [], [-1.0, np.nan]], "float"),
        "temperature": Step(ROWS, np.float32(0.7)),
        "info": Sample[Any](ROWS, [{"a": [1, np.float32(2)]}, None, [1, 2]]),
    }
    types = {
        "reward": FieldType("Sample", "float"),
        "answer": FieldType("Prompt", "str"),
        "ids": FieldType("PromptToken", "int"),
        "log_probs": FieldType("Token", "float"),
        "temperature": FieldType("Step", "float"),
        "info": FieldType("Sample", "json"),
    }
    return Batch(ROWS, columns, types)


def test_each_axis_lies_in_a_table_of_its_own_without_padding() -> None:
    tables = to_arrow(example())
    assert tables.keys() == {"samples", "groups", "step", "prompts/ids"}
    assert tables["samples"].num_rows == 3
    assert tables["groups"].schema.names == ["uid", "planned", "settled", "answer"]
    assert tables["prompts/ids"].column("ids").to_pylist() == [[1, 2], [3]]
    assert tables["samples"].column("ids").to_pylist() == [0, 1, 1]


def test_a_missing_reward_is_null_and_a_token_that_is_not_finite_stays_nan() -> None:
    tables = to_arrow(example())
    assert tables["samples"].column("reward").to_pylist() == [1.0, None, 0.5]
    assert tables["samples"].column("log_probs").values.null_count == 0
    again = from_arrow(tables)
    assert np.isnan(again.columns["reward"].values[1])
    assert np.isnan(again.columns["log_probs"].values[2])


def test_identity_types_and_values_come_back() -> None:
    before, after = example(), from_arrow(to_arrow(example()))
    assert after.rows == before.rows
    assert after.rows.settled.tolist() == [1, 2]
    assert after.types == before.types
    assert after.columns["info"].values.tolist() == [{"a": [1, 2.0]}, None, [1, 2]]
    assert after.columns["temperature"].values.dtype == np.float32
    assert after.columns["answer"].values.tolist() == ["one", "zwölf"]


def test_numbers_are_read_without_a_copy() -> None:
    tables = to_arrow(example())
    values = from_arrow(tables).columns["log_probs"].values
    assert not values.flags.writeable
    assert values.ctypes.data == tables["samples"].column("log_probs").values.buffers()[1].address


def test_a_pickled_batch_travels_as_arrow() -> None:
    again = pickle.loads(pickle.dumps(example(), protocol=5))
    assert again.rows == ROWS
    assert again.columns["ids"].values.tolist() == [1, 2, 3]


def test_prompts_without_trajectories_come_back() -> None:
    rows = Rows(["a", "b"], planned=[8, 8], settled=[0, 0])
    again = from_arrow(to_arrow(Batch(rows, {"p": Prompt(rows, ["x", "y"])}, {"p": FieldType("Prompt", "str")})))
    assert len(again.rows) == 0
    assert again.rows.planned.tolist() == [8, 8]
    assert list(again.columns["p"]) == ["x", "y"]


def test_text_that_is_not_unicode_is_replaced() -> None:
    rows = Rows.of(["a", "b"])
    batch = Batch(rows, {"t": Sample(rows, ["\ud800x", "ü"])}, {"t": FieldType("Sample", "str")})
    assert from_arrow(to_arrow(batch)).columns["t"].values.tolist() == ["?x", "ü"]


@pytest.mark.parametrize(("dtype", "value"), [("str", None), ("json", {"a": int})])
def test_a_value_that_its_type_cannot_hold_is_never_stored_as_something_else(dtype: Any, value: Any) -> None:
    rows = Rows.of(["a", "b"])
    batch = Batch(rows, {"t": Sample[Any](rows, ["x", value])}, {"t": FieldType("Sample", dtype)})
    with pytest.raises(TypeError, match=f"{dtype} cannot hold"):
        to_arrow(batch)
