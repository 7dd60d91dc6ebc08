"""A batch as Arrow record batches: the form in which it lies in the object store and on disk.

Up to four kinds of table, all without padding: `samples` (identity, `Sample` and `Token` columns), `groups` (uid,
planned and settled sizes, `Prompt` columns), `step` (scalars), and one `prompts/<field>` for the distinct prompts of
each `PromptToken` field, whose int32 index per trajectory lies in `samples`. Numbers are read back without a copy.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from flowrl.batch import Batch, Prompt, PromptToken, Sample, Step, Token
from flowrl.column import Column, as_array, objects
from flowrl.encode import dumps, plain
from flowrl.fields import FieldType
from flowrl.rows import Array, Rows

if TYPE_CHECKING:
    import pyarrow as pa

Tables = dict[str, "pa.RecordBatch"]
TYPE_KEY = b"flowrl.type"


def to_arrow(batch: Batch) -> Tables:
    """The batch as record batches by table name."""
    import pyarrow as pa

    rows = batch.rows
    samples: dict[str, tuple[Any, bytes]] = {
        "group": (pa.array(rows.group), b""),
        "session": (pa.array(rows.session), b""),
        "output": (pa.array(rows.output), b""),
    }
    groups: dict[str, tuple[Any, bytes]] = {
        "uid": (pa.array(list(rows.uids), pa.string()), b""),
        "planned": (pa.array(rows.planned), b""),
        "settled": (pa.array(rows.settled), b""),
    }
    step: dict[str, tuple[Any, bytes]] = {}
    tables: Tables = {}
    for name, column in batch.columns.items():
        mark = str(batch.types[name]).encode()
        array = _array(column.values, batch.types[name])
        if isinstance(column, Step):
            step[name] = (array, mark)
        elif isinstance(column, Prompt):
            groups[name] = (array, mark)
        elif isinstance(column, Token):
            samples[name] = (_lists(column.offsets, array), mark)
        elif isinstance(column, PromptToken):
            samples[name] = (pa.array(column.index), mark)
            tables[f"prompts/{name}"] = _table({name: (_lists(column.offsets, array), mark)})
        else:
            samples[name] = (array, mark)
    tables |= {"samples": _table(samples), "groups": _table(groups)}
    return tables | ({"step": _table(step)} if step else {})


def from_arrow(tables: Tables) -> Batch:
    """The batch again; numeric values are views of Arrow's memory."""
    samples, groups = tables["samples"], tables["groups"]
    rows = Rows(
        groups.column("uid").to_pylist(),
        *(samples.column(name).to_numpy() for name in ("group", "session", "output")),
        *(groups.column(name).to_numpy() for name in ("planned", "settled")),
    )
    columns: dict[str, Column[Any]] = {}
    types: dict[str, FieldType] = {}
    for table in (tables[name] for name in ("samples", "groups", "step") if name in tables):
        for field in table.schema:
            if field.metadata and TYPE_KEY in field.metadata:
                axis, _, dtype = field.metadata[TYPE_KEY].decode()[:-1].partition("[")
                types[field.name] = FieldType(cast(Any, axis), cast(Any, dtype))
                columns[field.name] = _column(rows, types[field.name], table.column(field.name), tables, field.name)
    return Batch(rows, columns, types)


def _column(rows: Rows, type_: FieldType, array: Any, tables: Tables, name: str) -> Column[Any]:
    if type_.axis == "PromptToken":
        distinct = tables[f"prompts/{name}"].column(name)
        return PromptToken(rows, _values(distinct.values, type_), distinct.offsets.to_numpy(), array.to_numpy())
    if type_.axis == "Token":
        return Token(rows, _values(array.values, type_), array.offsets.to_numpy())
    values = _values(array, type_)
    if type_.axis == "Step":
        return Step(rows, values[0])
    return Prompt(rows, values) if type_.axis == "Prompt" else Sample(rows, values)


def _table(columns: dict[str, tuple[Any, bytes]]) -> pa.RecordBatch:
    import pyarrow as pa

    fields = [
        pa.field(name, array.type, metadata={TYPE_KEY: mark} if mark else None)
        for name, (array, mark) in columns.items()
    ]
    return pa.RecordBatch.from_arrays([array for array, _ in columns.values()], schema=pa.schema(fields))


def _lists(offsets: Array, values: Any) -> Any:
    import pyarrow as pa

    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values)


def _array(values: Array, type_: FieldType) -> Any:
    import pyarrow as pa

    stored = as_array(values, type_.dtype)
    if type_.dtype == "json":
        return pa.array([None if item is None else dumps(item) for item in stored], pa.large_string())
    if type_.dtype == "str":
        try:
            return pa.array(stored, pa.large_string())
        except UnicodeEncodeError:  # a lone surrogate has no UTF-8
            return pa.array([plain(item) for item in stored], pa.large_string())
    return pa.array(stored, from_pandas=type_.nullable)


def _values(array: Any, type_: FieldType) -> Array:
    if type_.dtype == "json":
        return objects(None if item is None else json.loads(item) for item in array.to_pylist())
    if type_.dtype == "str":
        return objects(array.to_pylist())
    if type_.dtype == "bool" or array.null_count:
        return as_array(array.to_numpy(zero_copy_only=False), type_.dtype)
    values: Array = array.to_numpy(zero_copy_only=True)
    assert values.dtype != np.float64, "floats are float32 at rest"
    return values
