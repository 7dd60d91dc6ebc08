"""JSON text from any value that a node, a metric or a data set may hand over."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any, other: Callable[[Any], Any] = repr) -> Any:
    """The value in native JSON types: numpy scalars and arrays unwrapped, NaN and infinity as null.

    `other` says what becomes of a value that JSON has no form for.
    """
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), other)
    if isinstance(value, np.floating):
        return plain(float(value))
    if isinstance(value, np.generic):
        return plain(value.item(), other)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(plain(key, other)): plain(item, other) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item, other) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Path):
        return str(value)
    return other(value)


def native(value: Any) -> Any:
    """The same for a value of a field, where nothing may turn into its description.

    Raises `TypeError` for a value that JSON has no form for, `ValueError` for one that holds itself.
    """
    try:
        return plain(value, _refused)
    except RecursionError as error:
        raise ValueError("json cannot hold a value that holds itself, or is nested so deep") from error


def _refused(value: Any) -> Any:
    raise TypeError(f"json cannot hold {value!r}")


def dumps(value: Any) -> str:
    """One line of JSON; never fails on numpy values, NaN or lone surrogates."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError):  # not all of it is native: the slow way makes it so
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    return text
