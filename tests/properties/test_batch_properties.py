"""Batches of any shape: through the wire, in any order, against computations row by row."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from flowrl.batch import Batch, Column, Prompt, PromptToken, Sample, Step, Token
from flowrl.column import NUMPY_DTYPES
from flowrl.fields import AXES, DTYPES, Axis, Dtype, FieldType
from flowrl.join import canonical, concat, join, project, take, take_groups
from flowrl.rows import Rows
from flowrl.wire import from_arrow, to_arrow

TEXT = st.text(st.characters(exclude_categories=()), max_size=5)
JSON: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
VALUES: dict[Dtype, SearchStrategy[Any]] = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(width=32) | st.sampled_from([0.1, math.nan, math.inf, -0.0]),
    "bool": st.booleans(),
    "str": TEXT,
    "json": JSON,
}
TYPES = [FieldType(axis, dtype) for axis in AXES for dtype in DTYPES if axis != "PromptToken" or dtype == "int"]


@st.composite
def rows_of(draw: st.DrawFn, max_groups: int = 4, empty_groups: bool = True) -> Rows:
    """Groups of 0 to 3 sessions of 1 or 2 outputs, shuffled."""
    uids = draw(st.lists(st.text("ab1", min_size=1, max_size=3), unique=True, max_size=max_groups))
    triples = [
        (group, session, output)
        for group in range(len(uids))
        for session in range(draw(st.integers(0 if empty_groups else 1, 3)))
        for output in range(draw(st.integers(1, 2)))
    ]
    group, session, output = zip(*draw(st.permutations(triples)), strict=True) if triples else ((), (), ())
    return Rows(uids, group, session, output, planned=[3] * len(uids), settled=[3] * len(uids))


def array(values: list[Any], dtype: Dtype) -> Any:
    """As a node would write them."""
    out = np.empty(len(values), dtype=NUMPY_DTYPES[dtype])
    for index, value in enumerate(values):
        out[index] = value
    return out


def column_of(draw: st.DrawFn, rows: Rows, type_: FieldType) -> Column[Any]:
    """A column of this type."""

    def some(size: int) -> Any:
        return array(draw(st.lists(VALUES[type_.dtype], min_size=size, max_size=size)), type_.dtype)

    if type_.axis == "Token":
        return Token.of(rows, [some(draw(st.integers(0, 3))) for _ in range(len(rows))], type_.dtype)
    if type_.axis == "PromptToken":
        return PromptToken[int].of(rows, [some(draw(st.integers(0, 3))) for _ in rows.uids])
    if type_.axis == "Step":
        return Step[Any](rows, some(1)[0]).cast(type_.dtype)
    return Prompt(rows, some(rows.num_groups)) if type_.axis == "Prompt" else Sample(rows, some(len(rows)))


@st.composite
def batches(draw: st.DrawFn, types: list[FieldType] = TYPES, empty_groups: bool = True) -> Batch:
    """A batch of one to four fields, named after their types."""
    rows = draw(rows_of(empty_groups=empty_groups))
    chosen = draw(st.lists(st.sampled_from(types), min_size=1, max_size=4, unique=True))
    return Batch(rows, {str(t): column_of(draw, rows, t) for t in chosen}, {str(t): t for t in chosen})


def by_row(batch: Batch) -> dict[str, Any]:
    """Every value under the name of its row or group: what a batch says, whatever its order."""
    return {name: values_of(column) for name, column in batch.columns.items()}


def values_of(column: Column[Any]) -> Any:
    if isinstance(column, Token | PromptToken):
        return {n: [shown(v) for v in row] for n, row in zip(column.rows.names(), column.jagged, strict=True)}
    names = (
        [""] if isinstance(column, Step) else column.rows.uids if isinstance(column, Prompt) else column.rows.names()
    )
    return {name: shown(value) for name, value in zip(names, column.values, strict=True)}


def shown(value: Any) -> str:
    """Equal texts for equal values, NaN included; a lone surrogate cannot be stored and becomes a question mark."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return "None" if value is None or (isinstance(value, float) and math.isnan(value)) else repr(value)


@given(batches())
def test_a_batch_comes_back_from_the_wire(batch: Batch) -> None:
    for again in (from_arrow(to_arrow(batch)), pickle.loads(pickle.dumps(batch, protocol=5))):
        assert again.rows == batch.rows
        assert again.rows.planned.tolist() == batch.rows.planned.tolist()
        assert again.types == batch.types
        assert by_row(again) == by_row(batch)


@given(batches([FieldType(axis, dtype) for axis in AXES if axis != "PromptToken" for dtype in ("int", "float")]))
def test_numbers_come_back_as_views_of_arrow_unless_one_is_missing(batch: Batch) -> None:
    for name, column in from_arrow(to_arrow(batch)).columns.items():
        type_ = batch.types[name]
        assert column.values.dtype == NUMPY_DTYPES[type_.dtype]
        missing = type_.nullable and np.isnan(batch.columns[name].values).any()
        if type_.axis != "Step" and not missing and len(column.values):
            assert not column.values.flags.writeable
            assert not column.values.flags.owndata


@given(batches(), st.data())
def test_a_batch_cut_into_blocks_and_put_together_in_any_order_is_the_same(batch: Batch, data: st.DataObject) -> None:
    uids = list(data.draw(st.permutations(batch.rows.uids)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(uids)), max_size=2)))
    blocks = [uids[start:end] for start, end in zip([0, *cuts], [*cuts, len(uids)], strict=True)]
    again = canonical(concat([take_groups(batch, block) for block in blocks]))
    expected = canonical(batch)
    assert again.rows == expected.rows
    assert again.rows.settled.tolist() == expected.rows.settled.tolist()
    assert by_row(again) == by_row(batch)


@given(batches(empty_groups=False), st.data())
def test_taking_every_row_in_another_order_changes_nothing(batch: Batch, data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(batch.rows)))), dtype=np.int64)
    taken = take(batch, order)
    assert taken.rows.names() == [batch.rows.names()[index] for index in order]
    assert by_row(taken) == by_row(batch)


@given(batches(), st.data())
def test_taking_some_rows_keeps_exactly_these(batch: Batch, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(batch.rows) - 1), unique=True) if len(batch.rows) else st.just([]))
    taken, names = take(batch, np.array(index, dtype=np.int64)), batch.rows.names()
    kept = {names[i] for i in index} | {batch.rows.uids[batch.rows.group[i]] for i in index} | {""}
    assert by_row(taken) == {f: {n: v for n, v in values.items() if n in kept} for f, values in by_row(batch).items()}


@given(batches(empty_groups=False), st.data())
def test_a_join_does_not_depend_on_the_order_of_rows_blocks_or_parts(batch: Batch, data: st.DataObject) -> None:
    names = list(batch.columns)
    parts = []
    for fields in ([name] for name in names):
        order = np.array(data.draw(st.permutations(range(len(batch.rows)))), dtype=np.int64)
        whole = take(project(batch, fields), order)
        cut = data.draw(st.integers(0, len(whole.rows.uids)))
        parts += [take_groups(whole, whole.rows.uids[:cut]), take_groups(whole, whole.rows.uids[cut:])]
    joined = join(data.draw(st.permutations(parts)))
    assert by_row(joined) == by_row(batch)
    assert all(column.rows == joined.rows for column in joined.columns.values())


@given(batches([FieldType("Sample", "float")]), batches([FieldType("Token", "int")]))
def test_a_join_keeps_the_trajectories_that_all_parts_have(one: Batch, two: Batch) -> None:
    common = set(one.rows.names()) & set(two.rows.names())
    joined = join([one, two])
    assert set(joined.rows.names()) == common
    for batch in (one, two):
        for name, values in by_row(batch).items():
            assert by_row(joined)[name] == {row: value for row, value in values.items() if row in common}


@st.composite
def numbers(draw: st.DrawFn, dtype: Dtype = "float") -> tuple[Sample[Any], Token[Any]]:
    """A number for each trajectory and one for each of its tokens."""
    rows = draw(rows_of())
    value = {"float": st.floats(-100, 100, width=32), "int": st.integers(-100, 100), "bool": st.booleans()}[dtype]
    samples = draw(st.lists(value, min_size=len(rows), max_size=len(rows)))
    tokens = [draw(st.lists(value, max_size=3)) for _ in range(len(rows))]
    return Sample(rows, array(samples, dtype)), Token.of(rows, tokens, dtype)


@pytest.mark.parametrize("dtype", ["float", "int", "bool"])
@given(data=st.data())
def test_reductions_over_tokens_are_those_of_each_row(dtype: Dtype, data: st.DataObject) -> None:
    _, token = data.draw(numbers(dtype))
    rows = [[float(value) for value in row] for row in token.jagged]
    assert token.sum("sample").values.tolist() == pytest.approx([math.fsum(row) for row in rows], abs=1e-9)
    means = [math.fsum(row) / len(row) if row else math.nan for row in rows]
    assert token.mean("sample").values.tolist() == pytest.approx(means, abs=1e-9, nan_ok=True)
    assert token.padded().shape == (len(rows), max(map(len, rows), default=0))


@given(numbers(), st.data())
def test_reductions_over_groups_are_those_of_each_group(
    columns: tuple[Sample[Any], Token[Any]], data: st.DataObject
) -> None:
    sample, _ = columns
    values = sample.values.astype(np.float64)
    values[data.draw(st.lists(st.integers(0, len(values) - 1)) if len(values) else st.just([]))] = np.nan
    with_gaps = Sample(sample.rows, values)
    for group in range(sample.rows.num_groups):
        own = [float(v) for v, g in zip(values, sample.rows.group, strict=True) if g == group]
        scored = [value for value in own if not math.isnan(value)]
        mean = math.fsum(scored) / len(scored) if scored else math.nan
        assert with_gaps.mean("prompt").values[group] == pytest.approx(mean, abs=1e-9, nan_ok=True)
        total = math.fsum(own) if len(scored) == len(own) else math.nan
        assert with_gaps.sum("prompt").values[group] == pytest.approx(total, abs=1e-9, nan_ok=True)


@given(numbers())
def test_broadcasting_gives_each_row_its_own_value(columns: tuple[Sample[Any], Token[Any]]) -> None:
    sample, token = columns
    spread = sample.per_token(token)
    assert [row.tolist() for row in spread.jagged] == [
        [value] * length for value, length in zip(sample.values.tolist(), token.lengths, strict=True)
    ]
    groups = Prompt(sample.rows, np.arange(sample.rows.num_groups)).per_sample(sample)
    assert groups.values.tolist() == sample.rows.group.tolist()


@given(numbers("bool"))
def test_masks_combine_like_booleans(columns: tuple[Sample[Any], Token[Any]]) -> None:
    sample, token = columns
    both, either = token & sample.per_token(token), token | ~token
    expected = [[bool(t) and bool(s) for t in row] for row, s in zip(token.jagged, sample, strict=True)]
    assert [row.tolist() for row in both.jagged] == expected
    assert both.values.dtype == np.bool_
    assert either.values.all()


@given(rows_of(), st.sampled_from(list(AXES)), st.data())
def test_a_cast_column_has_the_type_that_is_stored(rows: Rows, axis: Axis, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES if axis != "PromptToken" else ("int",)))
    column = column_of(data.draw, rows, FieldType(axis, dtype))
    assert column.cast(dtype).values.dtype == NUMPY_DTYPES[dtype]
    assert values_of(column.cast(dtype)) == values_of(column)
