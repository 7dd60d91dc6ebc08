"""Warnings of what is there and not needed (FR030)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowrl.errors import Problem
from flowrl.gate import Gate
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.select import needed
from flowrl.graph.subject import Subject
from flowrl.node import Node
from flowrl.spec.scalars import number


def needless(subject: Subject) -> Iterator[Problem]:
    """FR030: nodes that nobody needs, and models, data sets and pools that nobody uses."""
    yield from _nodes(subject)
    yield from _models(subject)
    document = subject.document
    pools = {node.pool for node in subject.declared} | {pool.shares for pool in document.pools.values()}
    data = {"train"} | {node.evaluation.dataset for node in subject.declared if node.evaluation is not None}
    for section, unused in (("data", set(document.data) - data), ("pools", set(document.pools) - pools)):
        for name in sorted(unused):
            yield Problem("FR030", subject.place(section, name, key=True), f"no node uses {section}.{name}",
                          f"{section}.{name}: null", severity="warning")  # fmt: skip


def _nodes(subject: Subject) -> Iterator[Problem]:
    """Each node whose outputs nobody reads; what only such a node needs is named with it."""
    fields = subject.graph.fields
    unread = [
        node
        for node in subject.nodes
        if node.weights not in ("updates", "syncs")
        and node.writes
        and node.name not in subject.goals
        and node.spec.gate is None  # it is there for its decision
        and not any(fields[field].readers for field in node.writes.values() if field in fields)
    ]
    waste = _Waste(subject)
    for node in unread:
        written = ", ".join(f"'{field}'" for field in node.writes.values())
        gate = next(iter(node.writes.values())) if isinstance(node.node, Gate) else ""
        yield Problem("FR030", subject.place("nodes", node.name, key=True),
                      f"nobody reads what nodes.{node.name} writes ({written}): it is wasted work",
                      f"gate: {gate}" if gate else f"nodes.{node.name}: null, or run.prune: true",
                      tuple(waste.notes(node)), severity="warning")  # fmt: skip


class _Waste:
    """What is known of unread nodes: who would read them with other settings, and what else only they need."""

    def __init__(self, subject: Subject) -> None:
        self.graph = subject.graph
        self.kept = needed(subject.graph, subject.goals)
        self.users: dict[str, set[str]] = {}
        """Nodes of each model."""
        self.off: dict[str, list[tuple[BoundNode, str]]] = {}
        """For each field the ports that would read it, if they were not switched off."""
        for node in subject.nodes:
            for model in node.models:
                self.users.setdefault(model, set()).add(node.name)
            for port, field in _switched_off(node).items():
                self.off.setdefault(field, []).append((node, port))

    def notes(self, node: BoundNode) -> Iterator[str]:
        for field in node.writes.values():
            for reader, port in self.off.get(field, ()):
                settings = ", ".join(f"{key}: {number(value)}" for key, value in _switches(reader, port).items())
                shown = f" ({settings})" * bool(settings)
                yield f"nodes.{reader.name} does not read '{field}' with these settings{shown}"
        if self.kept and node.name not in self.kept:
            alone = self._only_for(node.name)
            if len(alone) > 1:
                yield f"only it needs {', '.join(f'nodes.{name}' for name in sorted(alone - {node.name}))}"
            yield from (f"only it uses models.{model}" for model in node.models if self.users[model] <= alone)

    def _only_for(self, name: str) -> set[str]:
        """This node and those before it for which nobody else waits."""
        found, waiting = {name}, [name]
        while waiting:
            for source in self.graph.sources[waiting.pop()] - found - self.kept - {DATA}:
                if self.graph.targets[source] <= found:
                    found.add(source)
                    waiting.append(source)
        return found


def _switched_off(node: BoundNode) -> dict[str, str]:
    """Ports that the node's settings switch off, with the field that each would read."""
    found = {port: node.spec.reads.get(port, port) for port in sorted(node.switched_off)}
    return {port: field for port, field in found.items() if isinstance(field, str)}


def _switches(reader: BoundNode, port: str) -> dict[str, Any]:
    """Settings that are 0 or false and, if they were not, would let the node read the port."""
    assert reader.node is not None
    on = {bool: True, int: 1, float: 1.0}
    off = {key: value for key, value in reader.node if type(value) in on and not value}
    return {key: value for key, value in off.items()
            if _needs(reader.node.model_copy(update={key: on[type(value)]}), port)}  # fmt: skip


def _needs(node: Node, port: str) -> bool:
    try:
        return bool(node.needs().get(port))
    except Exception:  # a user's class may refuse settings that its validators never let through
        return False


def _models(subject: Subject) -> Iterator[Problem]:
    used = {model for node in subject.declared for model in node.models}
    updated = {node.model for node in subject.declared if node.weights == "updates"}
    for name, spec in subject.document.models.items():
        if name not in used:
            yield Problem("FR030", subject.place("models", name, key=True), f"no node uses models.{name}",
                          f"models.{name}: null", severity="warning")  # fmt: skip
        elif spec.trainable and name not in updated:
            yield Problem("FR030", subject.place("models", name, "trainable"),
                          f"models.{name} is trainable, but no node updates it: it stays as it is",
                          f"add an update.* node with model: {name}, or models.{name}: {{trainable: false}}",
                          severity="warning")  # fmt: skip
        elif subject.of_role(name, "syncs") and not subject.of_role(name, "generates"):
            yield Problem("FR030", subject.place("models", name, key=True),
                          f"models.{name} is trained and synced, but no node generates with it: it never sees text of "
                          "its own", f"let the rollout use model: {name}", severity="warning")  # fmt: skip
