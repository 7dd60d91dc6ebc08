"""What the checks of a pipeline look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from flowrl.errors import Place, Problem
from flowrl.fields import FieldType
from flowrl.graph.bind import Bound, BoundNode
from flowrl.graph.build import DATA, Graph
from flowrl.spec.document import Document
from flowrl.spec.read import Reading


@dataclass(frozen=True)
class Subject:
    """What the checks look at."""

    document: Document
    reading: Reading
    bound: Bound
    graph: Graph
    columns: dict[str, FieldType]
    columns_known: bool
    """Whether the data set could be asked for its columns."""

    @property
    def nodes(self) -> list[BoundNode]:
        """All bound nodes, in the order of declaration."""
        return list(self.graph.nodes.values())

    @cached_property
    def doubled(self) -> dict[str, list[str]]:
        """Fields with several writers; what else seems wrong with them may follow from that."""
        writers: dict[str, list[str]] = {name: [DATA] for name in self.columns}
        for node in self.nodes:
            misspelt = not node.spec.writes.keys() <= node.cls.output_ports.keys()
            for port, field in node.writes.items():
                if port in node.spec.writes or not misspelt:
                    writers.setdefault(field, []).append(node.name)
        return {field: names for field, names in writers.items() if len(names) > 1}

    @cached_property
    def renamed_badly(self) -> set[str]:
        """Fields that a misspelt output was to be written to: nobody writes them, for a reason that is reported."""
        return {
            field
            for node in self.nodes
            for port, field in node.spec.writes.items()
            if port not in node.cls.output_ports
        }

    def place(self, *path: str, key: bool = False) -> Place:
        """Where a value stands."""
        return self.reading.place(path, key=key)

    def of_role(self, model: str | None, role: str) -> list[BoundNode]:
        """Nodes that do this with the model's weights."""
        return [node for node in self.nodes if node.model == model and node.weights == role]


Check = Callable[[Subject], Iterator[Problem]]
