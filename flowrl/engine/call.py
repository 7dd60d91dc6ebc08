"""What the driver and a worker say to each other: set-up, calls, receipts. Small values, no columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowrl.evaluation import Asked
from flowrl.functions import sent_code
from flowrl.metrics import Failure, Metric
from flowrl.model import ModelSpec
from flowrl.node import Node
from flowrl.registry import NodeRef
from flowrl.rows import Rows
from flowrl.spec.strict import validated


@dataclass(frozen=True)
class NodeSetup:
    """A node as a worker needs it."""

    name: str
    ref: NodeRef
    params: Mapping[str, Any]
    model: str | None
    reads: Mapping[str, tuple[str, ...]]
    writes: Mapping[str, str]
    outputs: tuple[tuple[str, ...], ...]
    """Fields of each object that a call returns: fields with the same readers travel together."""
    on_error: str
    timeout: float | None
    code: Mapping[str, str] = field(default_factory=dict)
    """Text of the files in which its parameters name functions, by path."""

    @property
    def fields_read(self) -> tuple[str, ...]:
        """The fields of all its input ports, each once."""
        return tuple(dict.fromkeys(field for fields in self.reads.values() for field in fields))

    def made(self) -> Node:
        """The node, from its parameters as the document has them."""
        with sent_code(self.code):
            node = validated(self.ref.load(), dict(self.params))
        assert isinstance(node, Node)
        return node


@dataclass(frozen=True)
class WorkerSetup:
    """One worker of a pool, with all the nodes that run on it."""

    pool: str
    rank: int
    num_ranks: int
    nodes: tuple[NodeSetup, ...]
    models: Mapping[str, ModelSpec]
    seed: int
    num_threads: int
    device: str = "cpu"
    strict_io: bool = False
    can_kill: bool = True
    """Whether rows are scored in a process that can be killed; not with `--local`."""
    trained: tuple[str, ...] = ()
    """Models that a node of this worker updates."""
    optimizer_steps: Mapping[str, int] = field(default_factory=dict)
    """Optimizer steps of each trained model in the whole run."""
    updates_per_sync: int = 1
    """Batches that are trained between two weight syncs."""

    @property
    def name(self) -> str:
        """`pool/rank`, as shown to people."""
        return f"{self.pool}/{self.rank}"


@dataclass(frozen=True)
class Call:
    """Run a node on some groups."""

    node: str
    step: int
    uids: tuple[str, ...]
    attempt: int = 1
    block_groups: int | None = None
    """A stream sends a block when so many groups have settled; None sends everything at the end."""
    samples: tuple[str, ...] = ()
    """Groups whose values per sample are returned as one object more, for people to read."""
    asked: Asked | None = None
    """What a validation asks; None in training."""
    serves: bool = False
    """Generate beside the other calls of the worker; `Worker.pause` and `resume` then say when an engine sleeps."""


@dataclass(frozen=True)
class Receipt:
    """What the driver learns of one block; the columns stay where they are."""

    node: str
    step: int
    attempt: int
    worker: str
    rows: Rows
    settled: tuple[str, ...]
    start: float
    end: float
    bytes_in: int
    bytes_out: int
    metrics: tuple[Metric, ...] = ()
    failures: tuple[Failure, ...] = ()
    failed: bool = False
    """The call as a whole went wrong; the last failure says how."""
    last: bool = True
    changed: bool = True
    """Of an update: whether it changed the weights."""
    fields: tuple[tuple[str, ...], ...] = field(default=())
    """Fields of each returned object that other nodes read."""
    sampled: bool = False
    """Whether one object more holds what the call's `samples` asks for."""
    oldest: Mapping[str, int] = field(default_factory=dict)
    """Of a node that generates: the smallest version of the weights that made a token of each settled group.

    A group that has no token is missing.
    """
    longest: Mapping[str, int] = field(default_factory=dict)
    """Of a node that generates: tokens of the longest response of each settled group that has any."""
