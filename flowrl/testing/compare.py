"""A node's outputs and inputs judged: against each other by identity, never by position, and against what is declared.

Every judgement is one phrase, empty where nothing is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flowrl.batch import COLUMN_CLASSES, Batch, Prompt, PromptToken, Step, Token
from flowrl.column import Column, as_array
from flowrl.fields import FieldType, Port
from flowrl.node import Cardinality, Node
from flowrl.rows import Rows

Values = dict[tuple[str, str], Any]
"""By port, and by row or group."""


def observed(column: Column[Any]) -> dict[str, Any]:
    """The column's value of each row (`u17_0_0`), group (`u17`), or of the step, as plain Python."""
    if isinstance(column, Step):
        return {"the step": column.values.tolist()[0]}
    if isinstance(column, Prompt):
        return dict(zip(column.rows.uids, column.values.tolist(), strict=True))
    if isinstance(column, Token | PromptToken):
        return {name: row.tolist() for name, row in zip(column.rows.names(), column.jagged, strict=True)}
    return dict(zip(column.rows.names(), column.values.tolist(), strict=True))


def values_of(node: Node, out: Any) -> Values:
    """All that an `Out` says, in the types that its fields store where they can."""
    columns = [value for value in out if isinstance(value, Column)] if isinstance(out, tuple) else []
    return {
        (name, key): value
        for (name, port), column in zip(node.output_ports.items(), columns, strict=False)
        for key, value in observed(_stored(column, port.type.dtype)).items()
    }


def _stored(column: Column[Any], dtype: Any) -> Column[Any]:
    try:
        return column.cast(dtype)
    except (TypeError, ValueError):
        return column


def difference(first: Values, second: Values, tolerance: float | None = None) -> str:
    """The first value in which two outputs differ; empty where none does. Without a tolerance every bit counts."""
    for port, key in [*first, *(key for key in second if key not in first)]:
        one, two = (values.get((port, key), "absent") for values in (first, second))
        if not _same(one, two, tolerance):
            return f"'{port}' of {key} is {_shown(one)} and {_shown(two)}"
    return ""


def _same(one: Any, two: Any, tolerance: float | None) -> bool:
    if tolerance is None:
        return repr(one) == repr(two)
    if isinstance(one, float) and isinstance(two, float):
        return (math.isnan(one) and math.isnan(two)) or math.isclose(one, two, rel_tol=tolerance, abs_tol=tolerance)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(_same(a, b, tolerance) for a, b in zip(one, two, strict=True))
    return bool(one == two)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def changed_input(before: Mapping[str, Column[Any]], batch: Batch) -> str:
    """The first input that is not what it was, with its row; empty where all are."""
    for name, column in batch.columns.items():
        old = before[name]
        for part in ("values", "offsets", "index"):
            one, two = getattr(old, part, None), getattr(column, part, None)
            if (
                one is not None
                and two is not None
                and (one.dtype != two.dtype or repr(one.tolist()) != repr(two.tolist()))
            ):
                rows = [key for key, value in observed(old).items() if repr(value) != repr(observed(column).get(key))]
                return f"'{name}'" + (f" of {rows[0]}" if rows else "")
        if _identity(old.rows) != _identity(column.rows):
            return f"the rows of '{name}'"
    return ""


def _identity(rows: Rows) -> tuple[Any, ...]:
    arrays = (rows.group, rows.session, rows.output, rows.planned, rows.settled)
    return rows.uids, *(np.asarray(array).tobytes() for array in arrays)


def misfit(port: Port, column: Any) -> str:
    """How a written column is not what its port says."""
    if type(column) is not COLUMN_CLASSES[port.type.axis]:
        return f"is {type(column).__name__}, not {port.type}"
    assert isinstance(column, Column)
    try:
        stored = column.cast(port.type.dtype)
    except (TypeError, ValueError) as error:
        bad = [key for key, value in observed(column).items() if not _fits(value, port.type)]
        return f"is no {port.type}: {error}" + (f", in {some(bad)}" if bad else "")
    if port.type.dtype != "float":
        return ""
    bad = [key for key, value in observed(stored).items() if not _finite(value, port.type.nullable)]
    if not bad:
        return ""
    if port.type.nullable:
        return f"is infinite for {some(bad)}; None or NaN says that a value is missing"
    return f"is not finite for {some(bad)}, and {port.type} has no null"


def _finite(value: Any, nullable: bool) -> bool:
    array = np.asarray(value, np.float64)
    return bool((np.isfinite(array) | (nullable & np.isnan(array))).all())


def _fits(value: Any, type_: FieldType) -> bool:
    """Whether one value, or the list of values of one row, can be stored."""
    try:
        as_array(value if type_.axis in ("Token", "PromptToken") else [value], type_.dtype)
    except (TypeError, ValueError):
        return False
    return True


def wrong_rows(cardinality: Cardinality, blocks: Sequence[Sequence[Rows]], given: Rows) -> str:
    """How the rows of the outputs of each block are not those that a node of this kind writes for what it was given."""
    if any(rows != each[0] for each in blocks for rows in each):
        return "its outputs are of different rows"
    written = [key for each in blocks for key in each[0].keys()]  # noqa: SIM118 - rows are no mapping
    allowed = given.keys()
    if cardinality == "expands":
        sizes = zip(given.uids, given.planned.tolist(), strict=True)
        planned = {(uid, session) for uid, size in sizes for session in range(size)}
        allowed = [key for key in written if key[:2] in planned]
    names = {key: f"{key[0]}_{key[1]}_{key[2]}" for key in written}
    if strange := names.keys() - set(allowed):
        return f"it writes rows that it was not asked for: {some(sorted(names[key] for key in strange))}"
    if len(names) < len(written):
        return f"it writes rows twice: {some(name for key, name in names.items() if written.count(key) > 1)}"
    if cardinality == "keeps" and len(written) < len(allowed):
        return f"it is given {len(allowed)} row{'s' * (len(allowed) != 1)} and writes {len(written)}: it must keep all"
    if written != [key for key in allowed if key in names]:
        return f"it writes the rows in another order than they came in: {some(names.values())}"
    return ""


def some(names: Iterable[str]) -> str:
    """The first few names."""
    listed = list(names)
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")
