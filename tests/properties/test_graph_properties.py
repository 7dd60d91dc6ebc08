"""Pipelines that are right by construction, and what one mistake in them leads to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from stub_nodes import document

from flowrl import Pipeline
from flowrl.errors import Problem
from flowrl.graph.draw import as_data

settings.register_profile("graphs", settings.get_profile("flowrl"), max_examples=50)
SLOW = settings.get_profile("graphs")


@dataclass(frozen=True)
class Made:
    """A pipeline: for each node the nodes whose values it reads; those that read nothing start from the data."""

    sources: dict[str, tuple[str, ...]]

    def nodes(self) -> dict[str, Any]:
        """The section of the document; node `n3` writes field `f3`."""
        return {
            name: {
                "use": "Mix" if sources else "Source",
                "reads": {"inputs": [f"f{source[1:]}" for source in sources]} if sources else {},
                "writes": {"value": f"f{name[1:]}"},
            }
            for name, sources in self.sources.items()
        }

    def readers(self, name: str) -> set[str]:
        """Nodes that read what this one writes."""
        return {other for other, sources in self.sources.items() if name in sources}


@st.composite
def pipelines(draw: st.DrawFn) -> Made:
    """A directed graph without cycles, its nodes declared in any order."""
    size = draw(st.integers(1, 8))
    sources = {
        f"n{number}": tuple(f"n{i}" for i in draw(st.lists(st.integers(0, number - 1), unique=True, max_size=3)))
        if number
        else ()
        for number in range(size)
    }
    return Made({name: sources[name] for name in draw(st.permutations(list(sources)))})


def errors(nodes: dict[str, Any]) -> list[Problem]:
    return [problem for problem in Pipeline(document(nodes)).check() if problem.severity == "error"]


@SLOW
@given(pipelines())
def test_a_pipeline_that_is_right_by_construction_has_no_error(made: Made) -> None:
    assert errors(made.nodes()) == []
    plan = Pipeline(document(made.nodes())).plan()
    assert sorted(plan.graph.order) == sorted(made.sources)
    place = {name: index for index, name in enumerate(plan.graph.order)}
    for name, sources in made.sources.items():
        assert all(place[source] < place[name] for source in sources)
        assert set(plan.graph.fields[f"f{name[1:]}"].readers) == made.readers(name)
    wasted = {problem.place.path for problem in plan.warnings}
    assert wasted == {f"nodes.{name}" for name in made.sources if not made.readers(name)}


@SLOW
@given(pipelines(), st.data())
def test_without_a_producer_exactly_its_readers_are_blamed(made: Made, data: st.DataObject) -> None:
    dropped = data.draw(st.sampled_from(sorted(made.sources)))
    nodes = made.nodes()
    del nodes[dropped]
    assume(nodes)
    found = errors(nodes)
    assert {problem.code for problem in found} <= {"FR020"}
    blamed = {match[1] for problem in found if (match := re.match(r"nodes\.(\w+) reads", problem.fact))}
    assert blamed == made.readers(dropped)
    assert len(found) == len(blamed)


@SLOW
@given(pipelines(), st.data())
def test_a_second_writer_is_one_error(made: Made, data: st.DataObject) -> None:
    field = f"f{data.draw(st.sampled_from(sorted(made.sources)))[1:]}"
    twin = data.draw(
        st.sampled_from([{"use": "Source", "writes": {"value": field}}, {"use": "Label", "writes": {"label": field}}])
    )
    nodes = list({**made.nodes(), "twin": twin}.items())
    (problem,) = errors(dict(data.draw(st.permutations(nodes))))
    assert problem.code == "FR021"
    assert f"'{field}'" in problem.fact
    assert "nodes.twin" in problem.fact


@SLOW
@given(pipelines(), st.data())
def test_a_back_edge_prints_a_cycle_that_is_there(made: Made, data: st.DataObject) -> None:
    nodes = made.nodes()
    later = [name for name, sources in made.sources.items() if sources]
    assume(later)
    end = data.draw(st.sampled_from(sorted(later)))
    ancestors, todo = set(), [end]
    while todo:
        todo += [source for source in made.sources[todo.pop()] if source not in ancestors and not ancestors.add(source)]  # type: ignore[func-returns-value]
    start = data.draw(st.sampled_from(sorted(ancestors)))
    nodes[start] = {**nodes[start], "use": "Mix"}
    nodes[start]["reads"] = {"inputs": [*nodes[start]["reads"].get("inputs", []), f"f{end[1:]}"]}
    (problem,) = errors(nodes)
    assert problem.code == "FR040"
    steps = re.findall(r"(\w+) -\[(\w+)\]-> (?=(\w+))", problem.fact)
    assert steps[0][0] == steps[-1][2]
    assert [target for _, _, target in steps[:-1]] == [source for source, _, _ in steps[1:]]
    for source, field, target in steps:
        assert nodes[source]["writes"] == {"value": field}
        assert field in nodes[target]["reads"]["inputs"]


@SLOW
@given(pipelines(), st.data())
def test_the_order_of_declaration_changes_nothing(made: Made, data: st.DataObject) -> None:
    nodes = made.nodes()
    turned = dict(data.draw(st.permutations(list(nodes.items()))))
    one, two = Pipeline(document(nodes)), Pipeline(document(turned))
    assert as_data(one.plan()) == as_data(two.plan())
    assert one.plan().graph.order == two.plan().graph.order
    assert {problem.fact for problem in one.check()} == {problem.fact for problem in two.check()}
