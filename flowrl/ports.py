"""Ports of a node class, read from its hints: parameters of `run` are its reads, members of `Out` its writes."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from flowrl.column import Column
from flowrl.errors import NodeDefinitionError
from flowrl.fields import FieldType, Port
from flowrl.rows import Rows

DTYPE_NAMES: dict[Any, str] = {int: "int", float: "float", bool: "bool", str: "str", Any: "json"}


def field_type(hint: Any) -> FieldType | None:
    """The field type that a hint such as `Token[float]` names, or None if it names none."""
    origin = get_origin(hint)
    if not (isinstance(origin, type) and issubclass(origin, Column)) or not hasattr(origin, "axis"):
        return None
    (element,) = get_args(hint)
    dtype = DTYPE_NAMES.get(element)
    return FieldType(origin.axis, dtype) if dtype is not None else None  # type: ignore[arg-type]


def port_of(name: str, hint: Any, where: str) -> Port:
    """The port that a hint declares: `X`, `X | None`, `list[X]` or `list[X] | None`."""
    optional = False
    if get_origin(hint) in (Union, types.UnionType):
        members = [member for member in get_args(hint) if member is not type(None)]
        optional = len(members) < len(get_args(hint))
        hint = members[0] if len(members) == 1 else hint
    many = get_origin(hint) is list
    found = field_type(get_args(hint)[0] if many else hint)
    if found is None:
        raise NodeDefinitionError(
            f"{where}: '{name}' needs a field type such as Sample[float] or Token[int] "
            f"(axes Step, Prompt, Sample, PromptToken, Token; types int, float, bool, str, Json), not {hint!r}"
        )
    return Port(name, found, optional, many)


def read_ports(cls: type[Any]) -> dict[str, Port]:
    """What `run` reads, in the order of its parameters."""
    run = cls.__dict__["run"]
    plain = inspect.isfunction(run) and not inspect.iscoroutinefunction(run)
    parameters = list(inspect.signature(run).parameters.values()) if plain else []
    hints = _hints(run, cls) if plain else {}
    ports: dict[str, Port] = {}
    if not parameters or parameters[0].name in hints:
        raise NodeDefinitionError(f"{cls.__name__}.run must be a plain method: `def run(self, ...)`")
    for parameter in parameters[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise NodeDefinitionError(f"{cls.__name__}.run: '*{parameter.name}' hides what is read; name every field")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise NodeDefinitionError(f"{cls.__name__}.run: fields are passed by name; remove the '/'")
        if parameter.name not in hints:
            raise NodeDefinitionError(f"{cls.__name__}.run: '{parameter.name}' has no type hint")
        ports[parameter.name] = port_of(parameter.name, hints[parameter.name], f"{cls.__name__}.run")
    return ports


def write_ports(cls: type[Any]) -> tuple[dict[str, Port], bool]:
    """What `Out` writes, and whether its first member is `Rows` (a node that makes new trajectories)."""
    out = getattr(cls, "Out", None)
    if out is None:
        return {}, False
    if not (isinstance(out, type) and issubclass(out, tuple) and hasattr(out, "_fields")):
        raise NodeDefinitionError(f"{cls.__name__}.Out must be a typing.NamedTuple")
    hints = _hints(out, cls)
    names = list(hints)
    expands = bool(names) and hints[names[0]] is Rows
    ports = {name: port_of(name, hints[name], f"{cls.__name__}.Out") for name in names[expands:]}
    for name, port in ports.items():
        if port.many or port.optional:
            raise NodeDefinitionError(
                f"{cls.__name__}.Out: '{name}' is one field that is always written; hint it as {port.type}, without "
                f"{'list' if port.many else 'None'}"
            )
    return ports, expands


def _hints(target: Any, cls: type[Any]) -> Mapping[str, Any]:
    """Hints of a function or class; names may come from the module or from the node class itself."""
    module = sys.modules.get(cls.__module__)
    try:
        hints = get_type_hints(target, vars(module) if module else {}, dict(vars(cls)))
    except (NameError, TypeError) as error:
        raise NodeDefinitionError(
            f"{cls.__name__}: a type hint cannot be resolved ({error}). Names in the hints of run and Out must exist "
            "at the top of the module: not only under TYPE_CHECKING, and not inside a function"
        ) from error
    return {name: hint for name, hint in hints.items() if name != "return"}
