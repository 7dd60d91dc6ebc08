"""Binding: from the document's node sections to node objects with their fields, pool and model.

A node that cannot be bound is left out, or kept with its class alone, so that the other checks can still run.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from flowrl.errors import Problem, nearest
from flowrl.evaluation import Evaluation
from flowrl.fields import Port
from flowrl.node import ENGINE_KEYS, Node, Weights
from flowrl.registry import BrokenNode, NodeRef, UnknownNode, find
from flowrl.spec.document import Document, NodeSpec, homes
from flowrl.spec.facts import Said
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
    demands: frozenset[str] = frozenset()
    """Optional ports that its settings need."""
    switched_off: frozenset[str] = frozenset()
    """Optional ports that its settings do not read."""
    workers_per_copy: int = 1
    """Of one that generates: neighbouring workers of its pool that share a copy of the model."""
    sessions: int = 0
    """Of one that generates: the sessions that it makes of each prompt."""
    also_reads: Mapping[str, str] = field(default_factory=dict)
    """By setting, the frozen models that it computes with beside its own."""

    @property
    def pool(self) -> str:
        """The pool named in the document, or the built-in one."""
        return self.spec.pool or CPU_POOL

    @property
    def use(self) -> str:
        """What it is, for people."""
        return self.ref.use

    @property
    def model(self) -> str | None:
        """Name of the model used."""
        return self.spec.model

    @property
    def models(self) -> tuple[str, ...]:
        """Names of all models that it works on."""
        return (*(() if self.model is None else (self.model,)), *self.also_reads.values())

    @cached_property
    def fields_read(self) -> tuple[str, ...]:
        """The fields of all its input ports, each once."""
        return tuple(dict.fromkeys(field for fields in self.reads.values() for field in fields))

    @property
    def weights(self) -> Weights | None:
        """What the node does with the model's weights."""
        return self.cls.weights

    @property
    def evaluates(self) -> bool:
        """Whether it works on the rows of a data set of its own."""
        return issubclass(self.cls, Evaluation)

    @property
    def evaluation(self) -> Evaluation | None:
        """The node as what it is, if it evaluates and its parameters are right."""
        return self.node if isinstance(self.node, Evaluation) else None

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
    broken = set(reading.broken)
    classes: dict[str, _Class | Said] = {}
    for name, spec in document.nodes.items():
        found = classes.get(spec.use) or classes.setdefault(spec.use, _class_of(spec.use, folder))
        if isinstance(found, Said):
            place = reading.place(("nodes", name, "use"))
            problems.append(Problem(found.code, place, f"nodes.{name}: {found.fact}", found.fix))
            continue
        try:
            node, wrong, more = repair(
                found.cls, spec.params, reading.place, ("nodes", name), known=ENGINE_KEYS, homes=homes()
            )
            needs = _needs(node) if node is not None else {}
            workers_per_copy = node.workers_per_copy() if node is not None else 1
            group = document.batch.group
            sessions = group if node is None else node.sessions_of(group)
            also = node.also_reads() if node is not None else {}
        except Exception as error:  # what a user's class raises when it is made is a mistake like any other
            problems.append(raised(name, found.cls, error, reading))
            continue
        problems += wrong
        broken |= more - {("nodes", name, key) for key in spec.model_fields_set}
        # What a wrong setting would have asked for is not known.
        demands = frozenset() if wrong else frozenset(port for port, wanted in needs.items() if wanted)
        off = frozenset(port for port, wanted in needs.items() if not wanted)
        bare = BoundNode(name, spec, found.ref, found.cls, node, {}, {}, demands, off, workers_per_copy, sessions, also)
        nodes[name], wrong = _connect(bare, reading, broken)
        problems += wrong
    return Bound(nodes, tuple(problems), _unresolved(nodes, reading, broken), frozenset(broken))


def raised(name: str, cls: type[Node], error: Exception, reading: Reading) -> Problem:
    """FR014: a class that fails when it is asked about its settings."""
    said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Problem("FR014", reading.place(("nodes", name, "use")), f"nodes.{name}: {cls.__name__} raised {said}",
                   "correct the class: settings that it cannot take are a ValueError of a validator")  # fmt: skip


def _needs(node: Node) -> dict[str, bool]:
    """What `needs` answers. Raises `TypeError` for what is no answer."""
    needs = node.needs()
    optional = {name for name, port in node.input_ports.items() if port.optional}
    if not isinstance(needs, dict) or any(not isinstance(wanted, bool) for wanted in needs.values()):
        raise TypeError(f"needs() must return a dictionary of optional ports and true or false, not {needs!r}")
    if lost := sorted(map(str, needs.keys() - optional)):
        raise TypeError(f"needs() names '{lost[0]}', which is no optional port of run")
    return needs


def _unresolved(nodes: Mapping[str, BoundNode], reading: Reading, broken: Collection[Path_]) -> frozenset[str]:
    """Nodes that were left out, or of which it is not known what they write."""
    unclear = {str(path[1]) for path in broken if path[:1] == ("nodes",) and path[2:3] == ("writes",)}
    return frozenset(declared(reading, "nodes") - nodes.keys() | unclear)


class _Class(NamedTuple):
    ref: NodeRef
    cls: type[Node]


def _class_of(use: str, folder: Path) -> _Class | Said:
    """What a `use:` names, or what is wrong with it."""
    try:
        ref = find(use, folder)
        return _Class(replace(ref, use=_shown(use, folder)), ref.load())
    except UnknownNode as error:
        return Said("FR009", str(error), _WHERE if ":" in use else "`flowrl nodes` lists the library")
    except BrokenNode as error:
        return Said("FR014", str(error), "docs/nodes.md says what a node class looks like")


def _shown(use: str, folder: Path) -> str:
    """A `use:` as pages show it, alike on every machine: a file by its way from the pipeline's folder, if shorter."""
    where, colon, name = use.rpartition(":")
    if not where.endswith(".py"):
        return use
    near = os.path.relpath(folder / where, folder)
    near = min(near, where, key=len) if near.startswith("..") else f"./{near}"
    return f"{near}{colon}{name}"


def declared(reading: Reading, section: str) -> set[str]:
    """Names in a section as the user wrote it, those that were refused included."""
    entries = reading.resolved.get(section)
    return set(entries) if isinstance(entries, dict) else set()


def _connect(node: BoundNode, reading: Reading, broken: Collection[Path_]) -> tuple[BoundNode, list[Problem]]:
    """The node with the fields of its ports; those that the user named in a wrong way are left out."""
    spec, cls, name = node.spec, node.cls, node.name
    problems = []
    for side, ports in (("reads", cls.input_ports), ("writes", cls.output_ports)):
        for port in getattr(spec, side):
            if port not in ports:
                place = reading.place(("nodes", name, side, port), key=True)
                fact = f"nodes.{name} has no {'input' if side == 'reads' else 'output'} '{port}'"
                problems.append(Problem("FR013", place, fact, nearest(port, ports)))

    def unclear(side: str, port: str) -> bool:
        return ("nodes", name, side) in broken or ("nodes", name, side, port) in broken

    reads = {}
    for port_name, port in cls.input_ports.items():
        asked = spec.reads.get(port_name, port_name)
        if (
            port_name in node.switched_off
            or unclear("reads", port_name)
            or (port_name == asked and not spec.reads.keys() <= cls.input_ports.keys())
        ):
            continue  # perhaps the port that a misspelt one stands for
        if isinstance(asked, list) and not (port.many and asked):
            place = reading.place(("nodes", name, "reads", port_name))
            fact = f"nodes.{name}: input '{port_name}' takes " + (
                "one field, not a list" if asked else "at least one field"
            )
            problems.append(Problem("FR013", place, fact, f"reads: {{{port_name}: {asked[0] if asked else 'FIELD'}}}"))
            continue
        reads[port_name] = tuple(asked) if isinstance(asked, list) else (asked,)
    writes = {port: spec.writes.get(port, port) for port in cls.output_ports if not unclear("writes", port)}
    return replace(node, reads=reads, writes=writes), problems
