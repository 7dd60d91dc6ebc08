"""Values of rows: of which type a column is, and what is wrong with a value that is of another."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from flowrl.data.rows import Row
from flowrl.fields import Dtype

PROMPT = "prompt"
"""The column that a rollout reads unless it is told otherwise: text, or chat messages."""
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_LARGEST_FLOAT = 3.4028235e38
"""Of the 32 bits in which a field holds a number."""
_ARTICLES: Mapping[Dtype, str] = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a string", "json": "JSON",
}  # fmt: skip


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


def misfit(row: Row, types: Mapping[str, Dtype], said: str) -> str:
    """What is wrong with a row, or nothing. `said` tells where the types come from."""
    for name, dtype in types.items():
        value = row.get(name)
        if holds_half(value):
            return f"'{name}' is {shown(value)}, which holds half of a character"
        if dtype == "json":
            if name == PROMPT and (fault := bad_messages(value)):
                return f"'{name}' is {shown(value)}, which is no prompt: {fault}"
            continue
        if value is None and dtype == "float":
            continue
        if name not in row:
            return f"the column '{name}' is missing"
        if not _is_a(value, dtype):
            return f"'{name}' is {shown(value)}, but {_ARTICLES[dtype]} {said}"
    return ""


def bad_messages(value: Any) -> str:
    """What is wrong with a prompt that is to be text or a list of chat messages; empty when nothing is."""
    if isinstance(value, str):
        return ""
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


def as_plain(row: Row) -> tuple[Row, str]:
    """A row in the types of JSON, and what cannot be had in them; NaN is a missing value."""
    import numpy as np  # not needed to read a document

    from flowrl.encode import native

    found: Row = {}
    for name, value in row.items():
        if not isinstance(name, str):
            return {}, f"the name of a column is {name!r}, not a string"
        if isinstance(value, (float, np.floating)) and math.isinf(value):
            return {}, f"'{name}' is {value}, which is no finite number"
        try:
            # What holds half of a character is refused later; made plain it would hold a question mark.
            found[name] = value if holds_half(value) else native(value)
        except (TypeError, ValueError) as error:
            return {}, f"'{name}' is {value!r:.60}, but {error}"
    return found, ""


def stored(row: Row, types: Mapping[str, Dtype]) -> Row:
    """The row with every column, and whole numbers as floats where the column has those."""
    return {name: _as_float(row.get(name)) if dtype == "float" else row.get(name) for name, dtype in types.items()}


def holds_half(value: Any) -> bool:
    """Whether some text in it holds half of a character (JSON's `\\ud800`), which cannot be stored as text."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            if not one.isascii() and _HALF_CHARACTER.search(one):
                return True
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            waiting += one
    return False


def shown(value: Any) -> str:
    """The beginning of a value as JSON."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else text[:37] + "..."


def _as_float(value: Any) -> Any:
    return None if value is None else float(value)


def _kind(value: Any) -> Dtype:
    for dtype, kind in (("bool", bool), ("int", int), ("float", float), ("str", str)):
        if isinstance(value, kind):
            return dtype  # type: ignore[return-value]
    return "json"


def _is_a(value: Any, dtype: Dtype) -> bool:
    kind = _kind(value)
    if kind == "int":
        return dtype in ("int", "float") and -(2**63) <= value < 2**63
    if kind == "float":
        return dtype == "float" and abs(value) <= _LARGEST_FLOAT
    return kind == dtype
