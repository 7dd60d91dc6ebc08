"""What the checks of a pipeline look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as setting
from functools import cached_property

from flowrl.errors import Place, Problem
from flowrl.fields import FieldType
from flowrl.graph.bind import Bound, BoundNode, declared
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
    goals: frozenset[str] = frozenset()
    """Nodes that were asked for by `--to-nodes`; the graph holds only what leads to them."""
    other_columns: Mapping[str, Mapping[str, FieldType]] = setting(default_factory=dict)
    """Of the data sets that evaluations name, as far as they are known."""

    @cached_property
    def nodes(self) -> list[BoundNode]:
        """The nodes of the graph, in the order of declaration."""
        return list(self.graph.nodes.values())

    @property
    def declared(self) -> list[BoundNode]:
        """All nodes that could be bound, those that the goals do not need included."""
        return list(self.bound.nodes.values())

    def names(self, section: str) -> set[str]:
        """Names in a section as the user wrote it, those that were refused included."""
        return declared(self.reading, section)

    @property
    def lost_roles(self) -> set[str | None]:
        """What nodes of an unknown model or class may do: then what seems to be missing may be there."""
        lost = {node.weights for node in self.nodes if node.model not in self.document.models}
        return lost | ({"syncs", "updates"} if self.bound.unresolved else set())

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

    def place_of(self, node: BoundNode, setting: str) -> Place:
        """Where a setting of a node stands; the name of the node where it has its default."""
        given = setting in node.spec.params or setting in node.spec.model_fields_set
        return self.place("nodes", node.name, *[setting] * given, key=not given)

    @cached_property
    def _by_role(self) -> dict[tuple[str | None, str | None], list[BoundNode]]:
        found: dict[tuple[str | None, str | None], list[BoundNode]] = {}
        for node in self.nodes:
            found.setdefault((node.model, node.weights), []).append(node)
        return found

    def of_role(self, model: str | None, role: str) -> list[BoundNode]:
        """Nodes that do this with the model's weights."""
        return self._by_role.get((model, role), [])


Check = Callable[[Subject], Iterator[Problem]]
