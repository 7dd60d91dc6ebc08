"""Arrow schemas as columns of a data set."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from flowrl.data.base import DataFault
from flowrl.errors import nearest
from flowrl.fields import Dtype

if TYPE_CHECKING:
    import pyarrow as pa


def types_of(schema: pa.Schema, origin: str, wanted: Collection[str] | None) -> dict[str, Dtype]:
    """Type of every column, or of those that are wanted. Raises `DataFault` for one that no field can hold."""
    found: dict[str, Dtype] = {}
    if wanted is not None and (lost := [name for name in wanted if name not in schema.names]):
        raise DataFault(("columns", lost[0]), f"'{origin}' has no column '{lost[0]}'", nearest(lost[0], schema.names))
    for column in schema:
        if wanted is not None and column.name not in wanted:
            continue
        if column.name in found:
            fix = "write the file anew, with another name for one of them"
            raise DataFault("path", f"'{origin}' has two columns '{column.name}'", fix)
        dtype = _dtype(column.type)
        if dtype is None:
            fact = f"the column '{column.name}' of '{origin}' is of type {column.type}, which no field can hold"
            raise DataFault("path", fact, "columns: {NAME: TYPE} reads only some of the columns")
        found[column.name] = dtype
    return found


def _dtype(kind: pa.DataType) -> Dtype | None:
    """The dtype of a field that holds such values; None for dates, bytes, decimals and the like."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return _dtype(kind.value_type)
    if types.is_boolean(kind):
        return "bool"
    if types.is_integer(kind):
        return "int"
    if types.is_floating(kind):
        return "float"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "str"
    if types.is_null(kind):
        return "json"
    inner = [kind.field(position).type for position in range(kind.num_fields)] if types.is_nested(kind) else []
    return "json" if inner and None not in map(_dtype, inner) else None
