"""Validation of plain data as YAML has it: as strict as Pydantic is with JSON, at every depth."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, Literal, get_args

from pydantic import BaseModel

from flowrl.model import Settings, default_values


def validated(model: type[BaseModel], data: Any) -> BaseModel:
    """Strict as Pydantic is with JSON: text is what a path, a date or a member of an enumeration is written as.

    Models that are no `Settings` are as strict inside them, unless they say otherwise themselves.
    """
    inner = _loose_models(model)
    if model.model_config.get("validate_default"):
        # Pydantic would ask of a default in Python what it asks of a value in JSON, where a path is text.
        data = {**{name: value for name, value in default_values(model).items() if value is not None}, **data}
    try:
        text = json.dumps(data, ensure_ascii=False).encode()
    except (TypeError, ValueError):  # no JSON: more digits than Python writes, or a value made in Python
        return model.model_validate(data)
    strict = True if inner and not any("strict" in one.model_config for one in inner) else None
    closed = inner and not any("extra" in one.model_config for one in inner)
    extra: Literal["forbid"] | None = "forbid" if closed else None
    return model.model_validate_json(text, strict=strict, extra=extra)


@cache
def _loose_models(model: type[BaseModel]) -> frozenset[type[BaseModel]]:
    """The models in the fields of a model that are no `Settings`."""
    found: set[type[BaseModel]] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [field.annotation for field in model.model_fields.values()]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in seen:
            seen.add(annotation)
            found |= {annotation} - ({annotation} if issubclass(annotation, Settings) else set())
            waiting += [field.annotation for field in annotation.model_fields.values()]
        waiting += get_args(annotation)
    return frozenset(found)
