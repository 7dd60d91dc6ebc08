"""`Pipeline`: load, check, plan and run one document, from YAML or from Python."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import PipelineError, Problem
from flowrl.graph.diff import Change, compare
from flowrl.graph.examine import Found, examine
from flowrl.graph.plan import Plan
from flowrl.spec.document import NodeSpec
from flowrl.spec.dump import dump_resolved
from flowrl.spec.read import Reading, read_document, read_value

if TYPE_CHECKING:
    from flowrl.launch import Result


VIEWS = ("tree", "mermaid", "dot", "svg", "html", "json", "resolved", "plan")
"""Forms in which `Pipeline.draw` shows a pipeline."""


class Pipeline:
    """One pipeline. `Pipeline({...})` takes the same mapping as the YAML file; relative paths start at `folder`.

    With `to_nodes`, only these nodes and what they depend on: `to_nodes=["advantage"]` stops before training.
    """

    def __init__(
        self,
        document: Mapping[str, Any] | Reading,
        folder: str | Path = ".",
        sets: Sequence[str] = (),
        to_nodes: Sequence[str] = (),
    ) -> None:
        if not isinstance(document, (Mapping, Reading)):
            what = f"{document!r:.80}, which is a {type(document).__name__}"
            raise TypeError(f"Pipeline takes a mapping like the YAML file, not {what}; flowrl.load reads a file")
        sets = (sets,) if isinstance(sets, str) else sets
        self.reading = document if isinstance(document, Reading) else read_value(document, sets, folder)
        self.folder = Path(folder)
        self.to_nodes = (to_nodes,) if isinstance(to_nodes, str) else tuple(to_nodes)

    @cached_property
    def _found(self) -> Found:
        return examine(self.reading, self.folder, self.to_nodes)

    def check(self) -> tuple[Problem, ...]:
        """Every problem, warnings included; empty when all is well."""
        return self._found.problems

    def plan(self) -> Plan:
        """What runs where. Raises `PipelineError` with every problem."""
        plan = self._found.plan
        if plan is None:
            raise PipelineError(self._found.problems)
        return plan

    def resolved(self) -> str:
        """The document with every default, those of the nodes' parameters included, as YAML."""
        document = self.reading.document
        if document is None:
            raise PipelineError(self.reading.problems)
        bound = self._found.nodes.items()
        parameters = {name: node.node.model_dump(mode="json") for name, node in bound if node.node is not None}
        nodes = {
            # Those that were not given among those that were, in the order of the class.
            name: NodeSpec.model_validate(spec.model_dump(exclude=set(spec.params)) | parameters.get(name, spec.params))
            for name, spec in document.nodes.items()
        }
        return dump_resolved(document.model_copy(update={"nodes": nodes}))

    def draw(
        self,
        view: str = "tree",
        *,
        unroll: int | None = None,
        color: bool = False,
        prompt_tokens: int | None = None,
        response_tokens: int | None = None,
    ) -> str:
        """The pipeline as text of one of the `VIEWS`.

        `unroll` draws so many steps under the schedule; `color` is for a terminal; the lengths are what the sizes in
        `plan` and `json` assume. Raises `PipelineError`, or `PictureError` where `svg` lacks Graphviz.
        """
        if view == "resolved":
            return self.resolved().rstrip("\n")
        return _draw(self.plan(), view, unroll, color, prompt_tokens, response_tokens)

    def _repr_html_(self) -> str:
        """The picture in a notebook, or what is wrong with the pipeline."""
        problems = [problem.render() for problem in self.check() if problem.severity == "error"]
        if problems:
            return f"<pre>{html.escape(chr(10).join(problems))}</pre>"
        page = html.escape(self.draw("html"), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 600px; border: 0"></iframe>'

    def diff(self, other: Pipeline) -> tuple[Change, ...]:
        """What is different in `other`; `str` of a change is a line for people."""
        return compare(self.plan(), other.plan())

    def run(
        self, *, local: bool = False, address: str | None = None, quiet: bool = False, resume: str | Path | None = None
    ) -> Result:
        """Run it: on Ray started here, on the cluster at `address`, or in this process with `local`.

        `resume` is the folder or the name of a run to go on from, or the folder of one of its checkpoints; without it
        `checkpoint.resume` decides.

        Raises `PipelineError` before anything starts, `RunError` when a started run fails.
        """
        from flowrl.launch import launch

        return launch(
            self.plan(), self.reading, self.resolved(), local=local, address=address, quiet=quiet,
            resume=None if resume is None else str(resume),
        )  # fmt: skip


def load(path: str | Path, sets: Sequence[str] = (), to_nodes: Sequence[str] = ()) -> Pipeline:
    """The pipeline in a YAML file or of a shipped name, with overrides as in `--set`, cut to what `to_nodes` need."""
    sets = (sets,) if isinstance(sets, str) else sets
    return Pipeline(read_document(path, sets), Path(path).parent, to_nodes=to_nodes)


def _draw(
    plan: Plan, view: str, unroll: int | None, color: bool, prompt_tokens: int | None, response_tokens: int | None
) -> str:
    from flowrl.graph.show import data, draw, page, report
    from flowrl.graph.sizes.measure import lengths_of

    if view in ("plan", "json") and unroll is None:
        lengths = lengths_of(plan, prompt_tokens, response_tokens)
        return report.as_plan(plan, lengths) if view == "plan" else json.dumps(data.as_data(plan, lengths), indent=2)
    if view == "json":
        return json.dumps(draw.as_picture_data(plan, unroll), indent=2)
    if view == "tree":
        return draw.as_tree(plan, color=color, unroll=unroll)
    drawings = {"mermaid": draw.as_mermaid, "dot": draw.as_dot, "svg": draw.as_svg, "html": page.as_html}
    if view not in drawings:
        raise ValueError(f"a pipeline can be drawn as {', '.join(VIEWS)}, not as {view!r}")
    return drawings[view](plan, unroll).rstrip("\n")
