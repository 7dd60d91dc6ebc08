"""`Pipeline`: load, check, plan and run one document, from YAML or from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import PipelineError, Problem
from flowrl.graph.bind import bind
from flowrl.graph.plan import Plan, find_problems
from flowrl.spec.document import NodeSpec
from flowrl.spec.dump import dump_resolved
from flowrl.spec.read import Reading, read_document, read_value

if TYPE_CHECKING:
    from flowrl.launch import Result


class Pipeline:
    """One pipeline. `Pipeline({...})` takes the same mapping as the YAML file."""

    def __init__(
        self, document: Mapping[str, Any] | Reading, folder: str | Path = ".", sets: Sequence[str] = ()
    ) -> None:
        self.reading = document if isinstance(document, Reading) else read_value(document, sets)
        self.folder = Path(folder)

    @cached_property
    def _found(self) -> tuple[tuple[Problem, ...], Plan | None]:
        return find_problems(self.reading, self.folder)

    def check(self) -> tuple[Problem, ...]:
        """Every problem, warnings included; empty when all is well."""
        return self._found[0]

    def plan(self) -> Plan:
        """What runs where. Raises `PipelineError` with every problem."""
        problems, plan = self._found
        if plan is None:
            raise PipelineError(problems)
        return plan

    def resolved(self) -> str:
        """The document with every default, those of the nodes' parameters included, as YAML."""
        document = self.reading.document
        if document is None:
            raise PipelineError(self.reading.problems)
        bound = bind(document, self.reading, self.folder).nodes
        parameters = {name: node.node.model_dump() for name, node in bound.items() if node.node is not None}
        nodes = {
            name: NodeSpec.model_validate(spec.model_dump() | parameters.get(name, {}))
            for name, spec in document.nodes.items()
        }
        return dump_resolved(document.model_copy(update={"nodes": nodes}))

    def run(self, *, local: bool = False, address: str | None = None, quiet: bool = False) -> Result:
        """Run it: on Ray started here, on the cluster at `address`, or in this process with `local`.

        Raises `PipelineError` before anything starts, `RunError` when a started run fails.
        """
        from flowrl.launch import launch

        return launch(self.plan(), self.reading, self.resolved(), local=local, address=address, quiet=quiet)


def load(path: str | Path, sets: Sequence[str] = ()) -> Pipeline:
    """The pipeline in a YAML file, with overrides as in `--set`."""
    return Pipeline(read_document(path, sets), Path(path).parent)
