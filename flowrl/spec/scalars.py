"""Plain YAML 1.2 scalars as values: the core schema, whatever the YAML library thinks of them.

`1e-6` is a float, `off` and `yes` are strings, and `1_000` is a string too (YAML 1.2 knows no underscores, so an editor
that checks the file agrees). `017` is seventeen.
"""

from __future__ import annotations

import math
import re

Scalar = str | int | float | bool | None

_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), float("inf")),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), float("-inf")),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), float("nan")),
}
# Python refuses to parse more than 4,300 digits.
_DECIMAL = re.compile(r"[-+]?[0-9]{1,4000}")
MOST_BITS = 14_000
"""Of a whole number that can be written in decimal."""
_OTHER_BASE = re.compile(r"0o[0-7]{1,4000}|0x[0-9a-fA-F]{1,3500}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?")


def resolve(text: str) -> Scalar:
    """The value of an unquoted scalar."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _OTHER_BASE.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


def is_date(text: str) -> bool:
    """Whether YAML 1.1 would read the unquoted scalar as a date."""
    return _DATE.fullmatch(text) is not None


def write(value: object) -> str:
    """A scalar as YAML shows it, strings in quotes; a list or a mapping by its name. For messages."""
    if isinstance(value, str):
        return f"'{value}'" if len(value) <= 60 else f"'{value[:57]}...'"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if not isinstance(value, (bool, int, float)) and value is not None:
        return f"a {type(value).__name__}"
    digits = number(value)
    return digits if len(digits) <= 60 else f"{digits[:57]}..."


def number(value: float | bool | None) -> str:
    """A number, boolean or null in YAML; reads back as the same value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return repr(value) if value.bit_length() < MOST_BITS else hex(value)
    if math.isnan(value):
        return ".nan"
    if math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return repr(value)
