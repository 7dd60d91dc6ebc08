"""Two pipelines compared by what they mean: nodes, edges, fields, models, pools, schedule and parameters.

Positions, comments, the order of declaration and defaults that are written out make no difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.spec.scalars import number

SECTIONS = ("batch", "models", "data", "pools", "schedule", "run", "tracking", "checkpoint")
"""Sections of the document that are compared key by key, after nodes, edges and fields."""
_MARK = {"added": "+", "removed": "-", "changed": "~"}


@dataclass(frozen=True)
class Change:
    """One difference: something is there only before, only after, or is another value."""

    section: str
    kind: Literal["added", "removed", "changed"]
    what: str
    """Name of a node, model or pool, an edge, or the dotted path of a setting within its section."""
    before: Any = None
    after: Any = None

    def __str__(self) -> str:
        line = f"{_MARK[self.kind]} {self.what}"
        if self.kind == "changed":
            return f"{line}: {_shown(self.before)} -> {_shown(self.after)}"
        return (
            line
            if self.section == "edges"
            else f"{line}: {_shown(self.after if self.kind == 'added' else self.before)}"
        )


def compare(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Every difference, by section; empty when both mean the same."""
    found = [
        *_mappings("pipeline", {"name": before.document.name}, {"name": after.document.name}),
        *_nodes(before, after),
        *_sets("edges", _edges(before), _edges(after)),
        *_mappings("fields", _fields(before), _fields(after)),
    ]
    one, two = _document(before, after), _document(after, before)
    for section in SECTIONS:
        found += _mappings(section, *({"": one[section]}, {"": two[section]}))
    return tuple(found)


def as_text(changes: tuple[Change, ...]) -> str:
    """The differences under the names of their sections."""
    lines: list[str] = []
    for section in dict.fromkeys(change.section for change in changes):
        lines += [section, *(f"  {change}" for change in changes if change.section == section)]
    return "\n".join(lines) or "no difference"


def as_data(changes: tuple[Change, ...]) -> dict[str, Any]:
    """The differences as plain data for tools."""
    shown = [
        {"section": c.section, "kind": c.kind, "what": c.what, "before": c.before, "after": c.after} for c in changes
    ]
    return {"format": 1, "changes": shown}


def _document(plan: Plan, other: Plan) -> dict[str, Any]:
    """The sections of a document; of a model or a pool that the other has not, what is not left at its default."""
    found, document = plan.document.model_dump(), plan.document
    for section, named, others in (
        ("models", document.models, other.document.models),
        ("pools", document.pools, other.document.pools),
    ):
        alone = {name: spec for name, spec in named.items() if name not in others}
        found[section] |= {name: spec.model_dump(exclude_defaults=True) for name, spec in alone.items()}
    return found


def _nodes(before: Plan, after: Plan) -> Iterator[Change]:
    one, two = before.graph.nodes, after.graph.nodes
    for name in sorted(one.keys() | two.keys()):
        if name not in two:
            yield Change("nodes", "removed", name, one[name].use)
        elif name not in one:
            yield Change("nodes", "added", name, None, two[name].use)
        else:
            was, now = _both(one[name], two[name])
            yield from _mappings("nodes", {name: was}, {name: now})


def _both(one: BoundNode, two: BoundNode) -> list[dict[str, Any]]:
    """The settings of a node before and after; classes from files differ where the text of the files does."""
    same = one.ref.name == two.ref.name and one.ref.source == two.ref.source and bool(one.ref.source)
    uses = (one.use, one.use if same else two.use) if same or one.use != two.use else (one.spec.use, two.spec.use)
    return [{**_settings(node), "use": use} for node, use in zip((one, two), uses, strict=True)]


def _settings(node: BoundNode) -> dict[str, Any]:
    """Everything that the document says of a node, its parameters and their defaults included."""
    assert node.node is not None, "the plan was checked"
    engine = {key: value for key, value in node.spec.model_dump().items() if key not in node.spec.params}
    reads = {port: fields[0] if len(fields) == 1 else list(fields) for port, fields in node.reads.items()}
    return {**engine, "reads": reads, "writes": dict(node.writes), **node.node.model_dump(mode="json")}


def _edges(plan: Plan) -> set[str]:
    later = {True: ", next step", False: ""}
    return {f"{e.source} -> {e.target} ({e.shown}{later[e.distance > 0]})" for e in plan.graph.edges}


def _fields(plan: Plan) -> dict[str, Any]:
    fields = plan.graph.fields.values()
    return {field.name: {"type": str(field.type), "writer": field.writer} for field in fields}


def _sets(section: str, before: set[str], after: set[str]) -> Iterator[Change]:
    for what in sorted(before | after):
        if what not in after or what not in before:
            yield Change(section, "removed" if what in before else "added", what)


def _mappings(section: str, before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> Iterator[Change]:
    """Differences of two nested mappings, down to the single value; keys of both in the order of the first."""
    for key in [*before, *(key for key in after if key not in before)]:
        what = f"{path}.{key}".strip(".")
        one, two = before.get(key), after.get(key)
        if key not in after:
            yield Change(section, "removed", what or section, one)
        elif key not in before:
            yield Change(section, "added", what or section, None, two)
        elif isinstance(one, dict) and isinstance(two, dict):
            yield from _mappings(section, one, two, what)
        elif one != two:
            yield Change(section, "changed", what or section, one, two)


def _shown(value: Any) -> str:
    """A value in one line, as YAML would have it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return value if isinstance(value, str) else number(value)
