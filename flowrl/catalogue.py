"""What there is to know of a node class before it is used: its line in the catalogue, and its page.

Everything is read from the class; nothing is written twice.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from flowrl.encode import plain
from flowrl.fields import Port
from flowrl.model import Head, default_values
from flowrl.node import Cardinality, Device, Node, Scope, Weights
from flowrl.registry import find
from flowrl.spec.scalars import number, resolve
from flowrl.spec.schema import parameters_schema

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Parameter:
    """One setting of a node."""

    name: str
    type: str
    """Such as `int`, `list of float`, `std | none`."""
    default: str
    """In YAML; empty where the parameter is required."""
    limits: str
    """Such as `>= 1, < 3`."""
    description: str


@dataclass(frozen=True)
class Read:
    """One input of a node."""

    name: str
    type: str
    optional: bool
    switched_by: tuple[str, ...]
    """Parameters that decide whether it is read."""
    read_by_default: bool | None
    """With the defaults; None where a required parameter decides, or where it is read if some node writes it."""


@dataclass(frozen=True)
class Entry:
    """One node of the catalogue."""

    use: str
    summary: str
    docstring: str
    parameters: tuple[Parameter, ...]
    reads: tuple[Read, ...]
    writes: Mapping[str, str]
    scope: Scope
    weights: Weights | None
    head: Head
    cardinality: Cardinality
    pure: bool
    device: Device
    source: str
    snippet: str
    """A line for `nodes:` to paste."""
    json_schema: Schema
    """Of the parameters."""

    def as_data(self) -> dict[str, Any]:
        """For tools; stable."""
        data: dict[str, Any] = plain(asdict(self))
        return data


def entry_of(use: str, folder: Path) -> Entry:
    """The entry of a library name, import path or file. Raises `UnknownNode` or `BrokenNode`."""
    cls = find(use, folder).load()
    schema = parameters_schema(cls)
    docstring = inspect.cleandoc(cls.__doc__ or "")
    parameters = tuple(_parameter(cls, name, schema) for name in cls.model_fields)
    return Entry(
        use, docstring.partition("\n")[0], docstring, parameters, _reads(cls, schema),
        {name: str(port.type) for name, port in cls.output_ports.items()},
        cls.scope, cls.weights, cls.head, cls.cardinality, cls.pure, cls.device,
        inspect.getsourcefile(cls) or "", _snippet(use, cls, schema), schema,
    )  # fmt: skip


def _parameter(cls: type[Node], name: str, schema: Schema) -> Parameter:
    field, one = cls.model_fields[name], schema["properties"][name]
    default = "" if field.is_required() else _yaml(default_values(cls)[name])
    return Parameter(name, type_of(one, schema), default, limits_of(one), field.description or "")


def type_of(one: Schema, schema: Schema) -> str:
    """The type that a JSON Schema describes, in a few words; `schema` holds its definitions."""
    if "enum" in one or "const" in one:
        return " | ".join(_yaml(choice) for choice in one.get("enum", [one.get("const")]))
    if "$ref" in one:
        inner = _resolved(one, schema)
        return type_of(inner, schema) if "properties" not in inner else "{" + ", ".join(inner["properties"]) + "}"
    if "anyOf" in one or "oneOf" in one:
        return " | ".join(dict.fromkeys(type_of(member, schema) for member in one.get("anyOf", one.get("oneOf", ()))))
    if "prefixItems" in one:
        return "[" + ", ".join(type_of(item, schema) for item in one["prefixItems"]) + "]"
    if one.get("type") == "array":
        return f"list of {type_of(one.get('items', {}), schema)}"
    if one.get("type") == "object":
        values = one.get("additionalProperties")
        return f"mapping to {type_of(values, schema)}" if isinstance(values, dict) else "mapping"
    return _TYPES.get(one.get("type", ""), "any")


_TYPES = {"integer": "int", "number": "float", "boolean": "bool", "string": "str", "null": "null"}
_LIMITS = {
    "minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters", "maxLength": "at most {} characters", "pattern": "matches {}",
    "minItems": "at least {} items", "maxItems": "at most {} items", "multipleOf": "a multiple of {}",
}  # fmt: skip


def limits_of(one: Schema) -> str:
    """The limits that a JSON Schema sets, those of the members of a union included."""
    members = [one, *one.get("anyOf", ())]
    if "prefixItems" in one:
        members = [item for item in one["prefixItems"][:1] if all(item == other for other in one["prefixItems"])]
    found = [words.format(member[key]) for member in members for key, words in _LIMITS.items() if key in member]
    return ", ".join(dict.fromkeys(found))


def _resolved(one: Schema, schema: Schema) -> Schema:
    found: Schema = schema["$defs"][one["$ref"].rpartition("/")[2]] if "$ref" in one else one
    return found


def smallest(one: Schema, schema: Schema) -> Any:
    """The smallest value that a JSON Schema allows, as far as its limits say; for parameters without a default."""
    one = _resolved(one, schema)
    if "examples" in one:
        return one["examples"][0]
    if "default" in one or "const" in one or "enum" in one:
        return one.get("default", one.get("const", one.get("enum", [None])[0]))
    members = [member for member in one.get("anyOf", one.get("oneOf", ())) if member.get("type") != "null"]
    if members:
        return smallest(members[0], schema)
    if "prefixItems" in one:
        return [smallest(item, schema) for item in one["prefixItems"]]
    kind = one.get("type")
    if kind in ("integer", "number"):
        return _smallest_number(one, whole=kind == "integer")
    if kind == "array":
        return [smallest(one.get("items", {}), schema)] * one.get("minItems", 0)
    if kind == "object":
        return {name: smallest(one["properties"][name], schema) for name in one.get("required", ())}
    return {"boolean": False, "string": "a" * one.get("minLength", 1), "null": None}.get(kind or "")


def _smallest_number(one: Schema, whole: bool) -> int | float:
    low, high = one.get("minimum"), one.get("maximum", one.get("exclusiveMaximum"))
    if low is None and "exclusiveMinimum" in one:
        above = one["exclusiveMinimum"]
        low = above + 1 if whole or high is None or above + 1 < high else (above + high) / 2
    if low is None:
        low = 1 if high is None or high > 1 else high - 1
    return int(low) if whole else float(low)


def smallest_parameters(cls: type[Node]) -> dict[str, Any]:
    """Such a value for every required parameter of a class."""
    schema = parameters_schema(cls)
    required = [name for name, field in cls.model_fields.items() if field.is_required()]
    return {name: smallest(schema["properties"][name], schema) for name in required}


def _reads(cls: type[Node], schema: Schema) -> tuple[Read, ...]:
    switches = _switches(cls, schema)
    standard = _made(cls, {})
    needs = standard.needs() if standard is not None else {}

    def read(name: str, port: Port) -> Read:
        shown = f"list of {port.type}" if port.many else str(port.type)
        by_default = needs.get(name) if standard is not None and port.optional else None if port.optional else True
        return Read(name, shown, port.optional, switches.get(name, ()), by_default)

    return tuple(read(name, port) for name, port in cls.input_ports.items())


def _switches(cls: type[Node], schema: Schema) -> dict[str, tuple[str, ...]]:
    """Optional ports with the parameters that decide on them: found by trying other values, one at a time."""
    standard = _made(cls, {})
    needs = standard.needs() if standard is not None else {}
    found: dict[str, dict[str, None]] = {port: {} for port in needs}
    for name in cls.model_fields if needs else ():
        others = [_made(cls, {name: value}) for value in _other_values(schema["properties"][name])]
        for port, wanted in needs.items():
            if any(other is not None and other.needs().get(port) != wanted for other in others):
                found[port][name] = None
    return {port: tuple(names) for port, names in found.items()}


def _other_values(one: Schema) -> list[Any]:
    members = [one, *one.get("anyOf", ())]
    choices = [choice for member in members for choice in member.get("enum", ())]
    return [*choices, True, False, None, 0, 1, 2, 0.0, 0.5, 1.0]


def _made(cls: type[Node], parameters: Mapping[str, Any]) -> Node | None:
    """An instance with the smallest value wherever one is required; None where these are refused."""
    try:
        return cls(**{**smallest_parameters(cls), **parameters})
    except ValidationError:
        return None


def _snippet(use: str, cls: type[Node], schema: Schema) -> str:
    """A line for `nodes:`, with every required parameter and with the engine's keys that this kind of node needs."""
    given: dict[str, Any] = {"use": use}
    given |= {"model": "critic" if cls.head == "value" else "policy"} if cls.weights is not None else {}
    given |= {"pool": "train"} if cls.device == "accelerator" and cls.weights != "syncs" else {}
    given |= {name: smallest(schema["properties"][name], schema) for name in schema.get("required", ())}
    name = use.rpartition(":")[2].rpartition(".")[2]
    many = {
        port.name: [f"{port.name}_1", f"{port.name}_2"]
        for port in cls.input_ports.values()
        if port.many and not port.optional
    }
    given |= {"reads": many} if many else {}
    return f"{_snake(name)}: " + _yaml(given)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def _yaml(value: Any) -> str:
    """A JSON value on one line of YAML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, str):
        plain_text = _PLAIN.fullmatch(value) and isinstance(resolve(value), str)
        return value if plain_text else json.dumps(value, ensure_ascii=False)
    return number(value)


_PLAIN = re.compile(r"[\w./]([\w./:-]*[\w./-])?")
