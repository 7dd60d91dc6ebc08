"""What may run next: the progress of one step through the graph, and the policy that a schedule is.

Everything here is a pure function of values; the engine asks, submits, and reports back what has settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from flowrl.evaluation import Asked
from flowrl.graph.build import DATA, Graph


@dataclass(frozen=True)
class Task:
    """A node instance: a node and the prompt groups that it works on."""

    node: str
    step: int
    uids: tuple[str, ...]


class Progress:
    """Which prompt groups of one step each node has settled.

    A node of scope `sample` or `group` may start on some groups as soon as every writer has settled these; one that
    computes with a model does so in canonical blocks, which are the same whatever the order of arrival. One of scope
    `batch` or `step` waits for the whole step. Weight and gate edges always wait for the whole predecessor.
    """

    def __init__(
        self,
        graph: Graph,
        step: int,
        uids: Sequence[str],
        canonical: Mapping[str, int] | None = None,
        asked: Asked | None = None,
    ) -> None:
        """`canonical` gives, by node, the groups of its canonical blocks: cut by the order of submission.

        `asked` is what a validation asks of its nodes; None in training.
        """
        self.step, self.asked = step, asked
        self.uids = tuple(uids)
        self._block_size = dict(canonical or {})
        self._graph = graph
        self._submitted: dict[str, set[str]] = {name: set() for name in graph.nodes}
        self._settled: dict[str, set[str]] = {name: set() for name in graph.nodes}
        self._done: set[str] = set()
        self._sources: dict[str, dict[str, set[str]]] = {name: {"field": set(), "whole": set()} for name in graph.nodes}
        for edge in graph.edges:
            if edge.source != DATA and not edge.distance:
                self._sources[edge.target]["field" if edge.kind == "field" else "whole"].add(edge.source)

    @property
    def title(self) -> str:
        """What it is the progress of, for people."""
        return f"step {self.step}" if self.asked is None else f"the validation after step {self.step}"

    @property
    def complete(self) -> bool:
        """Whether every node is done."""
        return len(self._done) == len(self._graph.nodes)

    def ready(self) -> Iterator[Task]:
        """Tasks whose inputs are there and which were not submitted yet, in plan order."""
        for name in self._graph.order:
            groups = self._available(name) - self._submitted[name]
            if not groups:
                continue
            if name not in self._block_size:
                yield Task(name, self.step, tuple(uid for uid in self.uids if uid in groups))
                continue
            for start in range(0, len(self.uids), self._block_size[name]):
                block = self.uids[start : start + self._block_size[name]]
                if groups.issuperset(block):
                    yield Task(name, self.step, block)

    def _available(self, name: str) -> set[str]:
        sources = self._sources[name]
        if not sources["whole"] <= self._done:
            return set()
        if self._graph.nodes[name].cls.scope in ("batch", "step") and not sources["field"] <= self._done:
            return set()
        return set(self.uids).intersection(*(self._settled[source] for source in sources["field"]))

    def submit(self, name: str, uids: Iterable[str]) -> None:
        """These groups are being worked on."""
        self._submitted[name].update(uids)

    def retry(self, name: str, uids: Iterable[str]) -> None:
        """These groups failed and are to be worked on again."""
        self._submitted[name].difference_update(uids)

    def settle(self, name: str, uids: Iterable[str]) -> None:
        """These groups are finished for this node, well or badly."""
        self._settled[name].update(uids)
        if len(self._settled[name]) == len(self.uids):
            self._done.add(name)

    def is_done(self, name: str) -> bool:
        """Whether a node has settled every group."""
        return name in self._done

    def released(self) -> list[str]:
        """Fields that every reader has read."""
        fields = self._graph.fields.values()
        return [f.name for f in fields if self._written(f.writer) and set(f.readers) <= self._done]

    def _written(self, writer: str) -> bool:
        return writer == DATA or writer in self._done

    def waiting(self) -> Mapping[str, int]:
        """For each node that has started and not ended: how many groups are missing; to name who is late."""
        return {
            name: len(self._submitted[name]) - len(self._settled[name])
            for name in self._graph.order
            if len(self._submitted[name]) > len(self._settled[name])
        }


class Schedule(Protocol):
    """A policy: how many prompts to admit, and when a batch may be cut."""

    def num_to_admit(self, num_in_flight: int) -> int:
        """How many prompts to submit now."""
