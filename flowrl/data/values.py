"""Values of rows: of which type a column is, and what is wrong with a value that is of another."""

from __future__ import annotations

import itertools
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flowrl.data.rows import Row
from flowrl.fields import Dtype

PROMPT = "prompt"
"""The column that a rollout reads unless it is told otherwise: text, or chat messages."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
MOST_NESTED = 200
"""Levels of lists and objects in a value."""
DECLARED = "as declared"
"""Where the types of columns come from that `columns:` gives."""
_STORABLE = "write whole characters, and lists and objects that end"
_LARGEST_FLOAT = 3.4028235e38
"""Of the 32 bits in which a field holds a number."""
_ARTICLES: Mapping[Dtype, str] = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string", "json": "JSON",
}  # fmt: skip


class Wrong(NamedTuple):
    """What is wrong with a row, and how to put it right, where there is more to say than that of any row."""

    fact: str
    fix: str = ""


def declare(rows: Iterable[Row]) -> dict[str, Dtype]:
    """Type of every column: that of its first value, but float where whole and other numbers mix."""
    declared: dict[str, Dtype] = {}
    empty: dict[str, Dtype] = {}
    for name, value in itertools.chain.from_iterable(row.items() for row in rows):
        if value is None:
            empty[name] = "json"
            continue
        kind = _kind(value)
        if declared.setdefault(name, kind) == "int" and kind == "float":
            declared[name] = "float"
    return {**empty, **declared}


def misfit(row: Row, types: Mapping[str, Dtype], said: str) -> Wrong | None:
    """What is wrong with a row. `said` tells where the types come from."""
    for name, dtype in types.items():
        value = row.get(name)
        if fault := _unstorable(value):
            return Wrong(f"'{name}' is {shown(value)}, {fault}", _STORABLE)
        if dtype != "json" and not (value is None and dtype == "float"):
            if name not in row:
                return Wrong(f"the column '{name}' is missing")
            fact = f"'{name}' is {shown(value)}, but {_ARTICLES[dtype]} {said}"
            if not _is_a(value, dtype):
                return Wrong(fact, f"correct the row, or columns: {{{name}: {_kind(value)}}}" * (said == DECLARED))
            if isinstance(value, (int, float)) and not _fits(value):
                bits = 64 if isinstance(value, int) else 32
                fix = f"a field has {bits} bits for it: write the column as text, in quotes, in every row"
                return Wrong(fact, fix)
        if name == PROMPT and dtype in ("json", "str") and (fault := bad_prompt(value)):
            fix = 'a prompt is text, or messages: [{"role": "user", "content": "..."}]'
            return Wrong(f"'{name}' is {shown(value)}, which is no prompt: {fault}", fix)
    return None


def bad_prompt(value: Any) -> str:
    """What is wrong with a prompt that is to be text or a list of chat messages; empty when nothing is."""
    if isinstance(value, str):
        return "" if value else "it is empty"
    if not isinstance(value, list):
        return "a prompt is a string or a list of chat messages"
    if not value:
        return "it holds no message"
    for number, message in enumerate(value, 1):
        if not isinstance(message, Mapping):
            return f"message {number} is no mapping of role and content"
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            return f"message {number} has no role"
        if not isinstance(content, str) and not (content and isinstance(content, list)):
            return f"message {number} has no content"
    return ""


def as_plain(row: Row) -> tuple[Row, Wrong | None]:
    """A row in the types of JSON, and what cannot be had in them; NaN is a missing value."""
    import numpy as np  # not needed to read a document

    from flowrl.encode import native

    found: Row = {}
    for name, value in row.items():
        if not isinstance(name, str):
            return {}, Wrong(f"the name of a column is {name!r}, not a string", "name columns by text")
        if isinstance(value, (float, np.floating)) and math.isinf(value):
            return {}, Wrong(f"'{name}' is {value}, which is no finite number", "null stands for a missing number")
        if fault := _unstorable(value):
            return {}, Wrong(f"'{name}' is {shown(value)}, {fault}", _STORABLE)
        try:
            found[name] = native(value)
        except (TypeError, ValueError) as error:
            fix = "give text, numbers, true, false, null, and lists and mappings of them"
            return {}, Wrong(f"'{name}' is {value!r:.60}, but {error}", fix)
    return found, None


def stored(row: Row, types: Mapping[str, Dtype]) -> Row:
    """The row with every column, and whole numbers as floats where the column has those."""
    return {name: _as_float(row.get(name)) if dtype == "float" else row.get(name) for name, dtype in types.items()}


def shown(value: Any) -> str:
    """The beginning of a value as JSON."""
    try:
        text = json.dumps(value, default=repr)
    except (TypeError, ValueError, RecursionError):  # of one that holds itself, or has keys that are no text
        text = reprlib.repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _unstorable(value: Any) -> str:
    """Why a value cannot be stored as JSON: half of a character (JSON's `\\ud800`), or no end to what is in it."""
    waiting = [(value, 0)]
    while waiting:
        one, depth = waiting.pop()
        if depth > MOST_NESTED:
            return f"which is nested more than {MOST_NESTED} deep, or holds itself"
        if isinstance(one, str):
            if not one.isascii() and _HALF_CHARACTER.search(one):
                return "which holds half of a character"
        elif isinstance(one, Mapping):
            waiting += [(part, depth + 1) for part in (*one.keys(), *one.values())]
        elif isinstance(one, (list, tuple, set, frozenset)):
            waiting += [(part, depth + 1) for part in one]
    return ""


def _as_float(value: Any) -> Any:
    return None if value is None else float(value)


def _kind(value: Any) -> Dtype:
    for dtype, kind in (("bool", bool), ("int", int), ("float", float), ("str", str)):
        if isinstance(value, kind):
            return dtype  # type: ignore[return-value]
    return "json"


def _is_a(value: Any, dtype: Dtype) -> bool:
    kind = _kind(value)
    return kind == dtype or (kind == "int" and dtype == "float")


def _fits(number: int | float) -> bool:
    """Whether a field can hold it."""
    return -(2**63) <= number < 2**63 if isinstance(number, int) else abs(number) <= _LARGEST_FLOAT
