"""The plan: an immutable answer to what runs where, in which order, on which fields, and who reads them next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from flowrl.errors import Problem
from flowrl.evaluation import Asked
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA, Field, Graph
from flowrl.graph.origins import origins_of
from flowrl.graph.pools import Pool, physical_name
from flowrl.graph.validation import Types, evaluation_of
from flowrl.spec.document import Document

BLOCKS_PER_STEP = 8
"""The number of objects, not their size, is what a step pays for."""
THE_GATE = "the gate"
"""What reads the field of a gate; no node has a space in its name."""


@dataclass(frozen=True)
class Walk:
    """Evaluations that ask for the same, and so share what is run for them."""

    evaluations: tuple[str, ...]
    dataset: str
    max_rows: int | None
    asked: Asked


@dataclass(frozen=True)
class Plan:
    """A checked pipeline, ready to run."""

    document: Document
    graph: Graph
    pools: Mapping[str, Pool]
    """Groups of workers by name."""
    warnings: tuple[Problem, ...] = ()
    whole: Plan | None = None
    """The plan before `run.prune` took out what nobody needs; None where nothing was taken out."""

    @property
    def num_samples(self) -> int:
        """Trajectories of a step: P x n."""
        return self.document.batch.prompts * self.document.batch.group

    @property
    def slack(self) -> int:
        """Versions by which the weights of a rollout may lag: the slack of the carried edges."""
        return self.document.max_staleness

    @cached_property
    def sessions(self) -> Mapping[str, int]:
        """By node the sessions of each prompt among the rows that it works on; where rollouts meet, those of all."""
        origins, nodes = origins_of(self.graph), self.graph.nodes
        return {
            name: min((nodes[rollout].sessions for rollout in origins.get(name, ())), default=self.document.batch.group)
            for name in (DATA, *nodes)
        }

    def shape(self, field: Field) -> str:
        """The shape of a field in a step."""
        return field.type.shape(self.document.batch.prompts, self.sessions[field.writer])

    @property
    def updates_per_sync(self) -> int:
        """Batches that one step trains before it syncs."""
        return self.document.updates_per_sync

    @property
    def groups_per_batch(self) -> int:
        """Groups of each batch that a step trains."""
        return self.document.batch.prompts // self.updates_per_sync

    def of_step(self, step: int) -> Graph:
        """What a step runs on training rows: all but what validation alone needs, and what has another `every:`."""
        graph = self.graph.training
        due = [name for name, node in graph.nodes.items() if step % node.spec.every == 0]
        return graph if len(due) == len(graph.nodes) else graph.restricted(due)

    def of_batch(self, step: int, number: int) -> Graph:
        """What a step runs on its batch of this number, from 0: only the last one is followed by the syncs."""
        graph = self.of_step(step)
        return graph if number == self.updates_per_sync - 1 else graph.restricted(graph.nodes.keys() - self.syncs)

    @cached_property
    def syncs(self) -> frozenset[str]:
        """Nodes that send weights to engines."""
        return frozenset(name for name, node in self.graph.nodes.items() if node.weights == "syncs")

    @cached_property
    def front(self) -> frozenset[str]:
        """Nodes that work on single groups while these are in flight, whatever the step; others wait for a batch.

        What generates, and what follows from it without a model; what a gate depends on, with or without one.
        """
        graph, found = self.graph.training, set[str]()
        reruns = graph.leading_to([self.gate.name]) if self.gate is not None else frozenset[str]()
        gated = {edge.target for edge in graph.edges if edge.kind == "gate"}
        for name in graph.order:
            node = graph.nodes[name]
            single = node.cls.scope in ("sample", "group") and node.spec.every == 1 and name not in gated
            alone = node.weights in (None, "generates") or name in reruns
            if single and alone and graph.sources[name] - {DATA} <= found:
                found.add(name)
        return frozenset(found)

    def walks(self, step: int | None = None) -> list[Walk]:
        """The validations that are due after a step, 0 for the time before training; without a step, all there are."""
        groups: dict[tuple[str, int | None, Asked], list[str]] = {}
        for node in (self.graph.nodes[name] for name in self.graph.order if self.graph.nodes[name].evaluates):
            evaluation = evaluation_of(node)
            if step is None or evaluation.due(step, node.spec.every, self.document.run.steps):
                key = (evaluation.dataset, evaluation.max_rows, evaluation.asked())
                groups.setdefault(key, []).append(node.name)
        return [Walk(tuple(names), *key) for key, names in groups.items()]

    def graph_of(self, walk: Walk) -> Graph:
        """What a validation runs: the evaluations and all that they read from, on the columns of their data set."""
        return self.graph.restricted(self.graph.leading_to(walk.evaluations), self._columns[walk.dataset])

    @cached_property
    def _columns(self) -> Mapping[str, Types]:
        """Of the data sets that evaluations name; empty of one whose columns are not known."""
        return {walk.dataset: self.document.data[walk.dataset].field_types() for walk in self.walks()}

    def pool_of(self, node: BoundNode) -> str:
        """The group of workers that a node runs on; of a sync, the one of the model's update."""
        if node.weights == "syncs":
            updates = [
                other for other in self.graph.nodes.values() if other.model == node.model and other.weights == "updates"
            ]
            node = updates[0] if updates else node
        name = physical_name(self.document.pools, node.pool)
        assert name is not None, "checked before"
        return name

    def engine_pools(self, model: str | None) -> list[str]:
        """The groups of workers that generate with a model."""
        nodes = self.graph.nodes.values()
        return sorted({self.pool_of(n) for n in nodes if n.model == model and n.weights == "generates"})

    @cached_property
    def outputs(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """For each node its written fields that anybody reads, grouped by who reads them."""
        return {name: self._reader_sets(node) for name, node in self.graph.nodes.items()}

    def _reader_sets(self, node: BoundNode) -> tuple[tuple[str, ...], ...]:
        sets: dict[tuple[str, ...], list[str]] = {}
        for field in node.writes.values():
            readers = self.readers(self.graph.fields[field])
            if readers:
                sets.setdefault(readers, []).append(field)
        return tuple(tuple(fields) for fields in sets.values())

    @property
    def groups_per_block(self) -> int:
        """Finished groups that a rollout sends together."""
        return max(1, -(-self.document.batch.prompts // BLOCKS_PER_STEP))

    @cached_property
    def canonical_groups(self) -> Mapping[str, int]:
        """Groups that each reader of weights works on at a time.

        Padding moves a log-probability by 5e-7, so the cut depends neither on the clock nor on the schedule. A reader
        on workers that generate or train takes everything at once: while they do, it cannot start, or had better wait.
        """
        nodes = self.graph.nodes.values()
        busy = {self.pool_of(node) for node in nodes if node.weights in ("generates", "updates")}
        readers = [node for node in nodes if node.weights == "reads" and node.cls.scope in ("sample", "group")]
        return {n.name: self.groups_per_batch if self.pool_of(n) in busy else self.groups_per_block for n in readers}

    @cached_property
    def gate(self) -> BoundNode | None:
        """The node that says which groups to keep."""
        return next((node for node in self.graph.nodes.values() if node.spec.gate is not None), None)

    def readers(self, field: Field) -> tuple[str, ...]:
        """Names of the nodes that read a field; the loop reads that of a gate."""
        gates = self.gate is not None and self.gate.spec.gate == field.name
        return (*field.readers, THE_GATE) if gates else field.readers

    def reads(self, node: BoundNode) -> list[Field]:
        """The fields that a node reads, each once."""
        return [self.graph.fields[name] for name in node.fields_read]

    def writes(self, node: BoundNode) -> list[Field]:
        """The fields that a node writes."""
        return [self.graph.fields[name] for name in node.writes.values()]
