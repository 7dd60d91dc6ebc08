"""Words for what pydantic found: code, fact and fix of one error."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flowrl.errors import nearest
from flowrl.spec import codes
from flowrl.spec.document import PATTERNS
from flowrl.spec.scalars import resolve, write
from flowrl.spec.tree import Path_, dotted


class Said(NamedTuple):
    """Code, fact and fix of a problem."""

    code: str
    fact: str
    fix: str = ""


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "none_required": "null",
}
_MAPPINGS = {"dict_type", "model_type", "model_attributes_type"}
_LIMITS = {
    "greater_than": ("above", "a number above {}"),
    "greater_than_equal": ("at least", "{} or more"),
    "less_than": ("below", "a number below {}"),
    "less_than_equal": ("at most", "{} or less"),
}
_LENGTHS = {
    "too_short": (True, "items"),
    "too_long": (False, "items"),
    "string_too_short": (True, "characters"),
    "string_too_long": (False, "characters"),
}
"""Whether the lower limit is missed, and what is counted."""
_WAYS_OUT = {
    "too_short": "add what is missing",
    "too_long": "write fewer",
    "string_too_short": "write some text",
    "string_too_long": "write a shorter text",
    "literal_error": "write one of these",
    "enum": "write one of these",
    "union_tag_invalid": "write one of these",
}
"""What to do where the value shows nothing better, and there is no default."""
_LIMIT_KEYS = {"greater_than": "gt", "greater_than_equal": "ge", "less_than": "lt", "less_than_equal": "le"}
_CHOICES = ("literal_error", "enum", "union_tag_invalid")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_QUOTED = ("true", "false", "True", "False", "TRUE", "FALSE")
_TRUE, _FALSE = {"yes", "on", "y", "1", "true"}, {"no", "off", "n", "0", "false"}


def belongs_elsewhere(key: str, known: Collection[str], homes: Mapping[str, str]) -> bool:
    """Whether an unknown key is one of another section, and not the singular or the plural of one of this."""
    return key in homes and all(one.rstrip("s") != key.rstrip("s") for one in known)


def unknown_key(path: Path_, known: Collection[str], homes: Mapping[str, str]) -> Said:
    """A key that its section does not have: the nearest name, or the section where it belongs."""
    key, where = str(path[-1]), dotted(path[:-1]) or "the document"
    fact = f"{where} has no key '{key}'"
    if path[0] == "schedule" and homes.get(key, "").startswith("a schedule"):
        unused = f"the chosen schedule does not use '{key}', which belongs in {homes[key]}"
        return Said(codes.UNUSED_KEY, unused, f"remove `{key}:`, or choose the mode that it belongs to")
    if belongs_elsewhere(key, known, homes):
        return Said(codes.UNKNOWN_KEY, fact, f"'{key}' belongs in {homes[key]}")
    return Said(codes.UNKNOWN_KEY, fact, nearest(key, known))


def missing_key(path: Path_, nullable: bool = False) -> Said:
    """A required key that is not there, or that is null where null is `nullable`, a value like others."""
    where = dotted(path[:-1]) or "the document"
    if isinstance(path[-1], int):
        return Said(codes.WRONG_TYPE, f"{where} is too short: item {path[-1] + 1} is missing")
    fix = f"add `{path[-1]}: ...`" + " with a value; null counts as left out" * nullable
    return Said(codes.MISSING_KEY, f"{where} lacks the key '{path[-1]}'", fix)


def wrong_value(errors: Sequence[Mapping[str, Any]], path: Path_, value: Any, default: str = "") -> Said:
    """A value of the wrong type or outside its limits; several errors are the branches of one union.

    `default` is the default of the key as YAML, if it has one: a way out where the value does not show another.
    """
    said = _wrong(errors, path, value)
    way_out = next((_WAYS_OUT[error["type"]] for error in errors if error["type"] in _WAYS_OUT), "")
    way_out = f"leave it out for its default, {default}" if default else way_out
    return said if said.fix else said._replace(fix=way_out)


def _wrong(errors: Sequence[Mapping[str, Any]], path: Path_, value: Any) -> Said:
    name, shown = dotted(path) or "the document", write(value)
    # Of the branches of a union, one that finds only the length wrong is the one that is meant.
    errors = [error for error in errors if error["type"] in _LENGTHS] or errors
    kinds = [error["type"] for error in errors]
    if all(kind in _EXPECTED for kind in kinds):
        expected = " or ".join(dict.fromkeys(_EXPECTED[kind] for kind in kinds))
        return Said(codes.WRONG_TYPE, f"{name} must be {expected}, not {shown}", _type_fix(kinds, value))
    needs = list(dict.fromkeys(need for error in errors for need in _needed(error)))
    if len(errors) > 1 and needs:
        close = nearest(str(value), needs)
        fix = _type_fix(kinds, value) or close * ("did you mean" in close)
        return Said(codes.NOT_ALLOWED, f"{name} must be {_listed(needs)}, not {shown}", fix)
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    if kind in _LIMITS:
        (word, fix), limit = _LIMITS[kind], _limit(context, kind)
        return Said(codes.NOT_ALLOWED, f"{name} must be {word} {limit}, not {shown}", f"write {fix.format(limit)}")
    if kind == "finite_number":
        return Said(codes.NOT_ALLOWED, f"{name} must be a finite number, not {shown}", "write a number in digits")
    if kind in _CHOICES:
        return _not_listed(context.get("expected", "") or context.get("expected_tags", ""), path, value)
    if kind == "string_pattern_mismatch":
        fact = f"{name} must match {context['pattern']}, which {shown} does not"
        return Said(codes.NOT_ALLOWED, fact, PATTERNS.get(context["pattern"], ""))
    if kind in ("value_error", "assertion_error"):
        cause = context.get("error", error["msg"])
        return Said(codes.NOT_ALLOWED, f"{name}: {cause}", getattr(cause, "fix", ""))
    if kind in _LENGTHS:
        (least, unit), most = _LENGTHS[kind], context.get("max_length")
        limit = f"at least {context['min_length']}" if least else f"at most {most}"
        unit = unit.removesuffix("s") if limit.endswith(" 1") else unit
        return Said(codes.NOT_ALLOWED, f"{name} must have {limit} {unit}, not {len(value)}")
    return Said(codes.NOT_ALLOWED, f"{name}: {error['msg'][0].lower()}{error['msg'][1:]}")


def _needed(error: Mapping[str, Any]) -> list[str]:
    """What one branch of a union takes; nothing where that is not said in few words."""
    kind, context = error["type"], error.get("ctx", {})
    if kind in _LIMITS:
        return [f"{_LIMITS[kind][0]} {_limit(context, kind)}"]
    if kind in ("literal_error", "enum"):
        return list(_choices(context["expected"]))
    return ["true", "false"] if kind == "bool_type" else [_EXPECTED[kind]] if kind in _EXPECTED else []


def _limit(context: Mapping[str, Any], kind: str) -> str:
    limit = context[_LIMIT_KEYS[kind]]
    return f"{limit:g}" if isinstance(limit, float) else str(limit)


def _choices(expected: str) -> Iterator[str]:
    """The values that Pydantic lists, in YAML."""
    for text, other in re.findall(r"'([^']*)'|([^\s,']+)", expected):
        if other != "or":
            yield _CONSTANTS.get(other, other) if other else text if isinstance(resolve(text), str) else f'"{text}"'


def _listed(allowed: Sequence[str]) -> str:
    return ", ".join(allowed[:-1]) + " or " * (len(allowed) > 1) + "".join(allowed[-1:])


def _not_listed(expected: str, path: Path_, value: Any) -> Said:
    data_type = path[:1] == ("data",) and path[-1] == "type"
    allowed = list(_choices(expected))
    listed = _listed(allowed) or expected
    fact = f"{dotted(path)} must be {listed}, not {write(value)}"
    close = nearest(str(value), allowed)
    return Said(codes.UNKNOWN_DATA if data_type else codes.NOT_ALLOWED, fact, close if "did you mean" in close else "")


def _type_fix(kinds: Sequence[str], value: Any) -> str:
    """What to write instead, where the value shows what was meant."""
    number = any(kind in ("int_type", "int_from_float", "float_type") for kind in kinds)
    if number and isinstance(value, bool):
        return f"{write(value)} is no number: write a number"
    if "int_type" in kinds and isinstance(value, float):
        return f"write {int(value)}" if _is_whole(value) else "write a whole number"
    if number and isinstance(value, str):
        return _number_from(value, whole="float_type" not in kinds)
    if "bool_type" in kinds and str(value).lower() in _TRUE | _FALSE:
        return f"write {'true' if str(value).lower() in _TRUE else 'false'}" + " without quotes" * (value in _QUOTED)
    if "string_type" in kinds and isinstance(value, (bool, int, float)):
        return f'write "{write(value)}"'
    if "list_type" in kinds or "tuple_type" in kinds:
        return f"write [{value}]" if isinstance(value, (str, int, float)) else ""
    return "write `key: value` pairs, indented below it" if set(kinds) & _MAPPINGS else ""


def _number_from(text: str, whole: bool) -> str:
    value = resolve(text)
    if isinstance(value, int if whole else (int, float)) and not isinstance(value, bool):
        return f"write {text} without quotes"
    try:
        # Python takes underscores and spaces that YAML does not.
        parsed = float(text)
    except ValueError:
        return ""
    if _is_whole(parsed):
        return f"write {int(parsed)}"
    return "write a whole number" if whole else f"write {parsed!r}"


def _is_whole(value: float) -> bool:
    """Whether a float means an integer, exactly."""
    return value.is_integer() and abs(value) < 2**53
