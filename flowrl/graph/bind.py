"""Binding: from the document's node sections to node objects with their fields, pool and model.

A node that cannot be bound is left out, or kept with its class alone, so that the other checks can still run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from flowrl.errors import Problem, nearest
from flowrl.fields import Port
from flowrl.node import ENGINE_KEYS, Node, Weights
from flowrl.registry import BrokenNode, NodeRef, UnknownNode, find
from flowrl.spec.document import Document, NodeSpec, homes
from flowrl.spec.read import Reading
from flowrl.spec.tree import Path_
from flowrl.spec.validate import repair

_WHERE = "./FILE.py:CLASS starts from the folder of this YAML file, pkg.module:CLASS from where flowrl is started"
CPU_POOL = "cpu"
"""The built-in pool of nodes that name none."""


@dataclass(frozen=True)
class BoundNode:
    """A node of the pipeline: its class, its parameters, and which fields its ports are."""

    name: str
    spec: NodeSpec
    ref: NodeRef
    cls: type[Node]
    node: Node | None
    """None when its parameters are wrong."""
    reads: Mapping[str, tuple[str, ...]]
    """Port to fields; several for a list port."""
    writes: Mapping[str, str]
    """Port to field."""

    @property
    def pool(self) -> str:
        """The pool named in the document, or the built-in one."""
        return self.spec.pool or CPU_POOL

    @property
    def model(self) -> str | None:
        """Name of the model used."""
        return self.spec.model

    @property
    def fields_read(self) -> tuple[str, ...]:
        """The fields of all its input ports, each once."""
        return tuple(dict.fromkeys(field for fields in self.reads.values() for field in fields))

    @property
    def weights(self) -> Weights | None:
        """What the node does with the model's weights."""
        return self.cls.weights

    @property
    def scores_rows(self) -> bool:
        """Whether each row runs alone, in a process that can be killed."""
        return self.cls.scores_alone(self.on_error)

    @property
    def on_error(self) -> str:
        """What a failed sample does: as asked for, or by the kind of node."""
        if self.spec.on_error is not None:
            return self.spec.on_error
        if self.cls.scores_rows():
            return "unscored"
        return "drop" if self.weights == "generates" else "fail"

    def port_of(self, field: str) -> Port:
        """The input port that reads a field."""
        return next(self.cls.input_ports[port] for port, fields in self.reads.items() if field in fields)


@dataclass(frozen=True)
class Bound:
    """All nodes that could be bound, what went wrong, and which nodes or fields are unknown because of it."""

    nodes: dict[str, BoundNode]
    problems: tuple[Problem, ...]
    unresolved: frozenset[str]
    """Names of nodes whose outputs nobody can know."""
    broken: frozenset[Path_]
    """Paths of the document that were refused, those of the nodes' parameters included."""


def bind(document: Document, reading: Reading, folder: Path) -> Bound:
    """Bind every node of the document; `folder` is where `./file.py:Class` starts from."""
    nodes: dict[str, BoundNode] = {}
    problems: list[Problem] = []
    for name, spec in document.nodes.items():
        place = reading.place(("nodes", name, "use"))
        try:
            ref = find(spec.use, folder)
            cls = ref.load()
        except UnknownNode as error:
            library = "" if ":" in spec.use else "`flowrl nodes` lists the library"
            problems.append(Problem("FR009", place, f"nodes.{name}: {error}", library or _WHERE))
            continue
        except BrokenNode as error:
            problems.append(Problem("FR014", place, f"nodes.{name}: {error}"))
            continue
        node, wrong, more = repair(cls, spec.params, reading.place, ("nodes", name), known=ENGINE_KEYS, homes=homes())
        reading = replace(reading, broken=reading.broken | more)
        problems += wrong
        bound, wrong = _connect(name, spec, ref, cls, node, reading)
        problems += [*wrong, *_references(bound, document, reading), *_failure_policy(bound, reading)]
        nodes[name] = bound
    return Bound(nodes, tuple(problems), frozenset(declared(reading, "nodes") - set(nodes)), reading.broken)


def declared(reading: Reading, section: str) -> set[str]:
    """Names in a section as the user wrote it, those that were refused included."""
    entries = reading.resolved.get(section)
    return set(entries) if isinstance(entries, dict) else set()


def _connect(
    name: str, spec: NodeSpec, ref: NodeRef, cls: type[Node], node: Node | None, reading: Reading
) -> tuple[BoundNode, list[Problem]]:
    problems = []
    for side, ports in (("reads", cls.input_ports), ("writes", cls.output_ports)):
        for port in getattr(spec, side):
            if port not in ports:
                place = reading.place(("nodes", name, side, port), key=True)
                fact = f"nodes.{name} has no {'input' if side == 'reads' else 'output'} '{port}'"
                problems.append(Problem("FR013", place, fact, nearest(port, ports)))
    reads = {}
    for port_name, port in (node.active_ports() if node else cls.input_ports).items():
        asked = spec.reads.get(port_name, port_name)
        if port_name == asked and not spec.reads.keys() <= cls.input_ports.keys():
            continue  # perhaps the port that a misspelt one stands for
        if isinstance(asked, list) and not (port.many and asked):
            place = reading.place(("nodes", name, "reads", port_name))
            fact = f"nodes.{name}: input '{port_name}' takes " + (
                "one field, not a list" if asked else "at least one field"
            )
            problems.append(Problem("FR013", place, fact, f"reads: {{{port_name}: {asked[0] if asked else 'FIELD'}}}"))
            continue
        reads[port_name] = tuple(asked) if isinstance(asked, list) else (asked,)
    writes = {port: spec.writes.get(port, port) for port in cls.output_ports}
    return BoundNode(name, spec, ref, cls, node, reads, writes), problems


def _failure_policy(bound: BoundNode, reading: Reading) -> Iterator[Problem]:
    """What `on_error` asks for must be possible for this kind of node."""
    asked, scores = bound.spec.on_error, bound.cls.scores_rows()
    allowed = (
        {"fail"} | ({"unscored", "drop"} if scores else set()) | ({"drop"} if bound.weights == "generates" else set())
    )
    allowed |= {"retry"} if bound.cls.pure and bound.weights in (None, "generates") else set()
    if asked is not None and asked not in allowed:
        yield Problem("FR007", reading.place(("nodes", bound.name, "on_error")),
                      f"nodes.{bound.name} ({bound.spec.use}) cannot {asked} what fails",
                      "on_error: " + " | ".join(sorted(allowed)))  # fmt: skip


def _references(bound: BoundNode, document: Document, reading: Reading) -> Iterator[Problem]:
    """Names of models and pools must exist, and be there exactly where the kind of node takes them."""
    name, spec = bound.name, bound.spec
    path = ("nodes", name)
    if spec.model is not None and spec.model not in declared(reading, "models") and not reading.is_broken(("models",)):
        place = reading.place((*path, "model"))
        yield Problem("FR010", place, f"nodes.{name} uses model '{spec.model}', which is not under models:",
                      nearest(spec.model, document.models) or f"models: {{{spec.model}: {{path: ...}}}}")  # fmt: skip
    if bound.weights is not None and spec.model is None and not reading.is_broken((*path, "model")):
        yield Problem("FR019", reading.place(path, key=True),
                      f"nodes.{name} ({spec.use}) works on a model but names none",
                      f"model: {next(iter(document.models), 'NAME')}")  # fmt: skip
    if bound.weights is None and spec.model is not None:
        yield Problem("FR019", reading.place((*path, "model"), key=True),
                      f"nodes.{name} ({spec.use}) works on no model", "remove `model:`")  # fmt: skip
    known = {CPU_POOL, *declared(reading, "pools")}
    if spec.pool is not None and spec.pool not in known and not reading.is_broken(("pools",)):
        place = reading.place((*path, "pool"))
        add = "" if len(known) > 1 else f"pools: {{{spec.pool}: {{workers: 1}}}}"
        yield Problem("FR012", place, f"nodes.{name} runs on pool '{spec.pool}', which is not under pools:",
                      add or nearest(spec.pool, known))  # fmt: skip
    if spec.pool is not None and bound.weights == "syncs":
        yield Problem("FR053", reading.place((*path, "pool"), key=True),
                      f"nodes.{name} takes no pool: a weight sync spans the pool of the update and every pool that "
                      "generates with the model", "remove `pool:`")  # fmt: skip
