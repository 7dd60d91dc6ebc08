"""What may run next: the progress of prompt groups through the graph, and the policy that a schedule is.

Everything here is a pure function of values; the engine asks, submits, and reports back what has settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrl.evaluation import Asked
from flowrl.graph.build import DATA, Graph
from flowrl.schedule.flow import Flow


@dataclass(frozen=True)
class Task:
    """A node instance: a node and the prompt groups that it works on."""

    node: str
    step: int
    uids: tuple[str, ...]


class Progress:
    """Which prompt groups each node has settled, of those that it walks through the graph.

    A node of scope `sample` or `group` may start on some groups as soon as every writer has settled these; one that
    computes with a model does so in canonical blocks, which are the same whatever the order of arrival. One of scope
    `batch` or `step` waits for all groups. Weight and gate edges always wait for the whole predecessor.
    """

    def __init__(
        self,
        graph: Graph,
        step: int,
        uids: Sequence[str] = (),
        canonical: Mapping[str, int] | None = None,
        asked: Asked | None = None,
        front: Progress | None = None,
        most: int | None = None,
    ) -> None:
        """`canonical` gives, by node, the groups of its canonical blocks: cut by the order of submission.

        `asked` is what a validation asks of its nodes; None in training. Nodes of the `front` are walked by that one,
        which may be ahead with some of these groups. `most` groups are given at a time to a node without a model; None
        is all that are there.
        """
        self.step, self.asked, self.uids = step, asked, ()
        self._graph, self._front, self._most = graph, front, most
        self._order = [name for name in graph.order if front is None or name not in front]
        self._block_size = dict(canonical or {})
        self._blocks: dict[str, list[tuple[str, ...]]] = {name: [] for name in self._order if name in self._block_size}
        self._submitted: dict[str, set[str]] = {name: set() for name in self._order}
        self._settled: dict[str, set[str]] = {name: set() for name in self._order}
        self._sources: dict[str, dict[str, set[str]]] = {name: {"field": set(), "whole": set()} for name in self._order}
        for edge in graph.edges:
            if edge.source != DATA and not edge.distance and edge.target in self._sources:
                self._sources[edge.target]["field" if edge.kind == "field" else "whole"].add(edge.source)
        self.admit(uids)

    uids: tuple[str, ...]
    """The groups that it walks, in the order of submission."""

    def __contains__(self, name: str) -> bool:
        """Whether it walks a node."""
        return name in self._settled

    def admit(self, uids: Sequence[str]) -> None:
        """Walk these groups too."""
        self.uids += tuple(uids)
        for name, blocks in self._blocks.items():
            size = self._block_size[name]
            blocks += [tuple(uids[start : start + size]) for start in range(0, len(uids), size)]

    def forget(self, uids: Iterable[str]) -> None:
        """These groups are trained or given up: what is still said of them does not matter."""
        gone = set(uids)
        self.uids = tuple(uid for uid in self.uids if uid not in gone)
        for found in (*self._submitted.values(), *self._settled.values()):
            found -= gone
        for name, blocks in self._blocks.items():
            left = (tuple(uid for uid in block if uid not in gone) for block in blocks)
            self._blocks[name] = [block for block in left if block]

    @property
    def title(self) -> str:
        """What it is the progress of, for people."""
        return f"step {self.step}" if self.asked is None else f"the validation after step {self.step}"

    @property
    def complete(self) -> bool:
        """Whether every node is done."""
        return all(map(self.is_done, self._graph.nodes))

    def ready(self) -> Iterator[Task]:
        """Tasks whose inputs are there and which were not submitted yet, in plan order."""
        for name in self._order:
            groups = self._available(name) - self._submitted[name]
            if not groups:
                continue
            if name in self._blocks:
                yield from (Task(name, self.step, block) for block in self._blocks[name] if groups.issuperset(block))
            else:
                ready = tuple(uid for uid in self.uids if uid in groups)
                most = self._most if self._most and self._graph.nodes[name].weights is None else len(ready)
                yield from (Task(name, self.step, ready[at : at + most]) for at in range(0, len(ready), most))

    def _available(self, name: str) -> set[str]:
        whole, sources = self._sources[name]["whole"], self._sources[name]["field"]
        if self._graph.nodes[name].cls.scope in ("batch", "step"):
            whole = whole | sources
        if not all(map(self.is_done, whole)):
            return set()
        return set(self.uids).intersection(*map(self.settled, sources))

    def submit(self, name: str, uids: Iterable[str]) -> None:
        """These groups are being worked on."""
        self._submitted[name].update(uids)

    def retry(self, name: str, uids: Iterable[str]) -> None:
        """These groups failed and are to be worked on again."""
        self._submitted[name].difference_update(uids)

    def settle(self, name: str, uids: Iterable[str]) -> None:
        """These groups are finished for this node, well or badly."""
        self._settled[name].update(self._submitted[name].intersection(uids))

    def settled(self, name: str) -> set[str]:
        """The groups that are finished for a node."""
        return self._settled[name] if self._front is None or name in self._settled else self._front.settled(name)

    def has_settled(self, uid: str) -> bool:
        """Whether a group is finished for every node that is walked here."""
        return all(uid in settled for settled in self._settled.values())

    def is_done(self, name: str) -> bool:
        """Whether a node has settled every group."""
        return self.settled(name).issuperset(self.uids)

    def released(self) -> list[str]:
        """Fields that every reader has read."""
        fields = self._graph.fields.values()
        return [f.name for f in fields if self._written(f.writer) and all(map(self.is_done, f.readers))]

    def _written(self, writer: str) -> bool:
        return writer == DATA or self.is_done(writer)

    def running(self, name: str) -> set[str]:
        """The groups that a node works on."""
        return self._submitted[name] - self._settled[name]

    def waiting(self) -> Mapping[str, int]:
        """For each node that has started and not ended: how many groups are missing; to name who is late."""
        late = {name: len(self.running(name)) for name in self._order}
        return {name: num for name, num in late.items() if num}


class Schedule(Protocol):
    """A policy: how many prompts to admit, when a batch is cut and of which groups, and what engines do meanwhile."""

    @property
    def serves(self) -> bool:
        """Whether rollouts run beside other calls of their workers."""

    @property
    def pauses(self) -> bool:
        """Whether engines sleep, with their requests kept, while a batch is trained."""

    @property
    def patient(self) -> bool:
        """Whether no group is given up for its age."""

    def num_to_admit(self, flow: Flow) -> int:
        """How many prompts to admit now."""

    def cut(self, flow: Flow, version: int) -> Sequence[str] | None:
        """The groups of the next batch, in the order of admission; None while it cannot be cut.

        `version` is that of the weights at the start of the cycle.
        """

    def overdue(self, flow: Flow, version: int) -> list[str]:
        """Groups that are too old to be trained."""

    def surplus(self, flow: Flow) -> list[str]:
        """Groups that the next step cannot use, when a step has ended."""
