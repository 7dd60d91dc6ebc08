"""JSON Schema of the document, for editors: every section, and for each node the parameters of its class.

An editor sees one file, before `extends` and `$params`: so a value may also be null or `$name`, and no key is required
except where nothing is extended. What is missing in the merged whole is found by `flowrl check`. A node is as open as
its `use:` leaves it: without one it changes an inherited node, and a class that the schema does not know may take
anything.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic.errors import PydanticUserError

from flowrl.encode import plain
from flowrl.fields import Port
from flowrl.node import ENGINE_KEYS, Node
from flowrl.registry import BrokenNode, UnknownNode, find, library_names
from flowrl.spec.document import Document
from flowrl.spec.params import REFERENCE
from flowrl.spec.tree import Tree

SCHEMA_FILE = Path(__file__).parent.parent / "schema" / "pipeline.json"
Schema = dict[str, Any]

_REFERENCE = {"$ref": "#/$defs/Param"}
_NULL = {"type": "null"}


def pipeline_schema(own: Mapping[str, type[Node]] | None = None) -> Schema:
    """The schema for the library's nodes and for those of the user, by the text of their `use:`.

    Without any of the latter it is committed as `flowrl/schema/pipeline.json`.
    """
    schema = Document.model_json_schema()
    del schema["properties"]["nodes"]["minProperties"]  # what is inherited counts too
    no_nodes = {"required": ["nodes"], "properties": {"nodes": {"type": "object", "maxProperties": 0}}}
    whole = {"required": schema["required"], "not": no_nodes}
    definitions = {name: _relaxed(definition) for name, definition in schema.pop("$defs").items()}
    reference = {"type": "string", "pattern": f"^{REFERENCE.pattern}$"}
    definitions["Param"] = {"description": "A value under `params:`.", **reference}
    schema = _relaxed(schema)
    about = "File that this one is laid over, or the name of a shipped pipeline, such as `grpo_sync`."
    schema["properties"]["extends"] = {"description": about, "anyOf": [{"type": "string"}, _NULL]}
    schema |= {"if": {"required": ["extends"]}, "else": whole}
    definitions |= _with_nodes(definitions["NodeSpec"], {**_library(), **(own or {})})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": definitions}


def schema_text(own: Mapping[str, type[Node]] | None = None) -> str:
    """The schema as it is written to a file."""
    return json.dumps(plain(pipeline_schema(own)), indent=1, ensure_ascii=False) + "\n"


class NodesUsed(NamedTuple):
    """The classes that pipelines name themselves, and what to say of those that the schema cannot know."""

    classes: Mapping[str, type[Node]]
    """Under the text of their `use:`; without one that means two classes in two folders."""
    notes: tuple[str, ...]


def nodes_used(trees: Iterable[Tree]) -> NodesUsed:
    """The nodes that these documents name by import path or by file."""
    found: dict[str, type[Node]] = {}
    unclear: set[str] = set()
    notes: list[str] = []
    for tree in trees:
        nodes = tree.entries.get("nodes")
        for name, entry in (nodes.tree.entries if nodes is not None else {}).items():
            use = entry.tree.entries.get("use")
            if use is None or not isinstance(use.tree.value, str) or REFERENCE.fullmatch(use.tree.value):
                continue
            text, span = use.tree.value, use.tree.span
            try:
                cls = find(text, span.source.folder).load()
            except (UnknownNode, BrokenNode) as error:
                notes.append(f"{span.place()}: the schema does not know nodes.{name}: {error}")
                continue
            if ":" in text and found.setdefault(text, cls) is not cls and text not in unclear:
                unclear.add(text)
                notes.append(f"{span.place()}: the schema does not know nodes.{name}: '{text}' means two classes")
    return NodesUsed({use: cls for use, cls in found.items() if use not in unclear}, tuple(notes))


def _library() -> dict[str, type[Node]]:
    found = {}
    for name in library_names():
        try:
            found[name] = find(name, Path()).load()
        except (UnknownNode, BrokenNode):  # somebody else's entry point; `flowrl nodes` says what is wrong with it
            continue
    return found


def _with_nodes(spec: Schema, nodes: Mapping[str, type[Node]]) -> Schema:
    """Adds to the node's section what each class takes; returns the definitions that this needs."""
    choices = [{"const": use, "description": _summary(cls)} for use, cls in nodes.items()]
    elsewhere = {"type": "string", "pattern": ":", "description": "An import path or a file, and a class."}
    spec["properties"]["use"]["anyOf"] = [*choices, elsewhere, _REFERENCE]
    definitions: Schema = {}
    spec["allOf"] = []
    for use, cls in nodes.items():
        name = re.sub(r"[^\w.-]", "-", use)
        parameters = parameters_schema(cls, f"#/$defs/{name}.{{model}}")
        definitions |= {f"{name}.{inner}": _relaxed(one) for inner, one in parameters.pop("$defs", {}).items()}
        properties = {**_relaxed(parameters)["properties"], **dict.fromkeys(sorted(ENGINE_KEYS), True)}
        for key, ports in (("reads", cls.input_ports), ("writes", cls.output_ports)):
            about = spec["properties"][key]["description"]
            properties[key] = {"description": about, "anyOf": [_ports(ports.values()), _REFERENCE, _NULL]}
        definitions[name] = {"description": _summary(cls), "properties": properties, "additionalProperties": False}
        asked = {"properties": {"use": {"const": use}}, "required": ["use"]}
        spec["allOf"].append({"if": asked, "then": {"$ref": f"#/$defs/{name}"}})
    return definitions


def parameters_schema(cls: type[Node], ref_template: str = "#/$defs/{model}") -> Schema:
    """JSON Schema of a class's parameters; only their names where the type of one has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a default that JSON cannot show
        try:
            schema = cls.model_json_schema(ref_template=ref_template)
        except PydanticUserError:
            schema = {}
    return {"properties": {key: {} for key in cls.model_fields}, **schema}


def _ports(ports: Iterable[Port]) -> Schema:
    about = {port.name: {"description": str(port.type)} for port in ports}
    return {"type": "object", "properties": about, "additionalProperties": False}


def _summary(cls: type[Node]) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def _relaxed(schema: Schema) -> Schema:
    """No required keys, null and `$name` everywhere, and no tag needed to choose among the members of a union."""
    relaxed = {key: value for key, value in schema.items() if key not in ("required", "discriminator", "oneOf")}
    if isinstance(relaxed.get("title"), str):
        del relaxed["title"]  # the name of the key once more
    if relaxed.get("default", 0) is None:
        del relaxed["default"]
    if "oneOf" in schema:
        relaxed["anyOf"] = schema["oneOf"]
    for part in ("properties", "patternProperties"):
        if part in schema:
            relaxed[part] = {name: _or_placeholder(inner, _NULL) for name, inner in schema[part].items()}
    if "patternProperties" in schema:
        relaxed.setdefault("additionalProperties", False)
    elif isinstance(schema.get("additionalProperties"), dict):
        relaxed["additionalProperties"] = _or_placeholder(schema["additionalProperties"], _NULL)
    if isinstance(schema.get("items"), dict):
        relaxed["items"] = _or_placeholder(schema["items"])
    if "prefixItems" in schema:
        relaxed["prefixItems"] = [_or_placeholder(item) for item in schema["prefixItems"]]
    if "anyOf" in relaxed:
        members = [_relaxed(member) for member in relaxed["anyOf"]]
        relaxed["anyOf"] = [one for each in members for one in (each["anyOf"] if set(each) == {"anyOf"} else [each])]
    return relaxed


def _or_placeholder(schema: Schema, *others: Schema) -> Schema:
    """The value, or a param, or one of the others: in a mapping null means left out, in a list it is a value."""
    relaxed = _relaxed(schema)
    described: Schema = {key: relaxed.pop(key) for key in ("description", "default") if key in relaxed}
    if not relaxed:
        return described
    members = relaxed["anyOf"] if set(relaxed) == {"anyOf"} else [relaxed]
    return {**described, "anyOf": [*members, *(one for one in (_REFERENCE, *others) if one not in members)]}
