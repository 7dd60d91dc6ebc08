"""JSON Schema of the document, for editors. Node parameters are left open: they belong to the node classes.

An editor sees one file, before `extends` and `$params`: so a value may also be null or `$name`, and no key is required
except where nothing is extended. What is missing in the merged whole is found by `flowrl check`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.spec.document import Document
from flowrl.spec.params import REFERENCE

SCHEMA_FILE = Path(__file__).parent.parent / "schema" / "pipeline.json"
_PLACEHOLDER = {"$ref": "#/$defs/LeftOutOrParam"}


def pipeline_schema() -> dict[str, Any]:
    """The schema; committed as `flowrl/schema/pipeline.json`."""
    schema = Document.model_json_schema()
    required = schema["required"]
    definitions = {name: _relaxed(definition) for name, definition in schema.pop("$defs").items()}
    schema = _relaxed(schema)
    schema["properties"]["extends"] = {"type": "string", "description": "File that this one is laid over."}
    schema["anyOf"] = [{"required": ["extends"]}, {"required": required}]
    reference = {"type": "string", "pattern": f"^{REFERENCE.pattern}$"}
    definitions["LeftOutOrParam"] = {"anyOf": [{"type": "null"}, reference]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "$defs": definitions}


def schema_text() -> str:
    """The schema as it is committed."""
    return json.dumps(pipeline_schema(), indent=1, ensure_ascii=False) + "\n"


def _relaxed(schema: Any) -> Any:
    """No required keys, null and `$name` everywhere, and no tag needed to choose among the members of a union."""
    relaxed = {key: value for key, value in schema.items() if key not in ("required", "discriminator", "oneOf")}
    if "oneOf" in schema:
        relaxed["anyOf"] = schema["oneOf"]
    for part in ("properties", "patternProperties"):
        if part in schema:
            relaxed[part] = {name: _or_placeholder(inner) for name, inner in schema[part].items()}
    if isinstance(schema.get("additionalProperties"), dict):
        relaxed["additionalProperties"] = _or_placeholder(schema["additionalProperties"])
    if "items" in schema:
        relaxed["items"] = _or_placeholder(schema["items"])
    if "anyOf" in relaxed:
        relaxed["anyOf"] = [_relaxed(member) for member in relaxed["anyOf"]]
    return relaxed


def _or_placeholder(schema: Any) -> Any:
    relaxed = _relaxed(schema)
    described = {key: relaxed.pop(key) for key in ("title", "description", "default") if key in relaxed}
    return {**described, "anyOf": [relaxed, _PLACEHOLDER]} if relaxed else described
