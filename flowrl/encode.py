"""JSON text from any value that a node, a metric or a data set may hand over."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """The value in native JSON types: numpy scalars and arrays unwrapped, NaN and infinity as null."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.floating):
        return plain(float(value))
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Path):
        return str(value)
    return repr(value)


def dumps(value: Any) -> str:
    """One line of JSON; never fails on numpy values, NaN or lone surrogates."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError):  # not all of it is native: the slow way makes it so
        text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
    return text
