"""The document with every default, as YAML that reads back as an equal document."""

from __future__ import annotations

from typing import Any

import yaml  # type: ignore[import-untyped]

from flowrl.spec.document import Document
from flowrl.spec.scalars import is_date, number, resolve

_STRING = "tag:yaml.org,2002:str"
_LINE = 110


def dump_resolved(document: Document) -> str:
    """Every section and every setting of it; small mappings in one line."""
    return dump_yaml(document.model_dump())


def dump_yaml(data: Any) -> str:
    """Plain data as YAML 1.2."""
    text: str = yaml.serialize(_node(data, 0), Dumper=yaml.CBaseDumper, allow_unicode=True, width=_LINE + 20)
    return text


def _node(value: Any, depth: int) -> Any:
    """The value as a node. All scalars are strings to the YAML library: what they mean is settled by their quotes."""
    if isinstance(value, dict):
        pairs = [(_node(name, depth), _node(item, depth + 1)) for name, item in value.items()]
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=_in_one_line(value, depth))
    if isinstance(value, (list, tuple)):
        items = [_node(item, depth + 1) for item in value]
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=_in_one_line(value, depth))
    if isinstance(value, str):
        quoted = not isinstance(resolve(value), str) or is_date(value) or value == "<<"
        return yaml.ScalarNode(_STRING, value, style="'" if quoted else None)
    return yaml.ScalarNode(_STRING, number(value))


def _in_one_line(value: Any, depth: int) -> bool:
    """Whether a mapping or list is flat and short enough."""
    inner = value.values() if isinstance(value, dict) else value
    return (
        depth > 0
        and not any(isinstance(item, (dict, list, tuple)) and item for item in inner)
        and len(str(value)) < _LINE
    )
