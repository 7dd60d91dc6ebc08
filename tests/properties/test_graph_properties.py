"""Pipelines that are right by construction, and what one mistake in them leads to."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import stub_nodes
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from stub_nodes import document

from flowrl import Pipeline
from flowrl.errors import Problem
from flowrl.fields import FieldType
from flowrl.graph.plan import Plan
from flowrl.graph.show.data import as_data

settings.register_profile("graphs", settings.get_profile("flowrl"), max_examples=60)
SLOW = settings.get_profile("graphs")

WORK = ("Source", "Label", "Mix", "Optional", "Spread", "Judge", "Mean", "Blend", "Chosen", "Gate", "Read")
"""Classes of stub nodes that work on fields; `Read` needs a model and its pool."""
DATA = {"prompt": FieldType("Prompt", "str"), "answer": FieldType("Prompt", "str")}


@dataclass(frozen=True)
class Made:
    """A pipeline, with what its maker knows of it."""

    nodes: dict[str, dict[str, Any]]
    """The section of the document, each node with all its ports named."""
    sections: dict[str, Any]
    types: dict[str, FieldType]
    """Of every field, the columns of the data included."""
    writers: dict[str, str]

    def readers(self, field: str) -> Counter[str]:
        """How often each node reads a field; every port names its own, so that those must be there."""
        found: Counter[str] = Counter()
        for name, node in self.nodes.items():
            for fields in node["reads"].values():
                found[name] += field in ([fields] if isinstance(fields, str) else fields)
        return +found

    def document(self, nodes: dict[str, Any] | None = None) -> dict[str, Any]:
        return document(self.nodes if nodes is None else nodes, **self.sections)

    def pipeline(self) -> Pipeline:
        return Pipeline(self.document())


@st.composite
def pipelines(draw: st.DrawFn, *, every: bool = True) -> Made:
    """Rollout, update and sync of a policy, perhaps a reference, and work between them, in any order."""
    models = {"policy": {"path": "x", "trainable": True}, "reference": {"path": "y"}}
    pools: dict[str, Any] = {"gpu": {"workers": draw(st.integers(1, 2))}}
    if draw(st.booleans()):
        pools["engine"] = draw(st.sampled_from([{"shares": "gpu"}, {"workers": 2}]))
    nodes: dict[str, dict[str, Any]] = {
        "rollout": {
            "use": "Rollout", "model": "policy", "pool": draw(st.sampled_from(sorted(pools))), "reads":
            {"prompt": draw(st.sampled_from(sorted(DATA)))}, "writes": {"response_mask": "mask", "response": "said"},
        },
        "sync": {"use": "Sync", "model": "policy", "reads": {}, "writes": {}},
        "judge": {"use": "Judge", "reads": {"response": "said"}, "writes": {"score": "judged"}},
        "sum": {"use": "Mix", "reads": {"inputs": ["judged"]}, "writes": {"value": "added"}},
    }  # fmt: skip
    scores = FieldType("Sample", "float")
    types = {
        **DATA,
        "mask": FieldType("Token", "bool"),
        "said": FieldType("Sample", "str"),
        "judged": scores,
        "added": scores,
    }
    writers = {**dict.fromkeys(DATA, "data"), "mask": "rollout", "said": "rollout", "judged": "judge", "added": "sum"}
    after = {
        "data": set[str](),
        "rollout": {"rollout"},
        "judge": {"rollout", "judge"},
        "sum": {"rollout", "judge", "sum"},
    }
    often, gated = dict.fromkeys(after, 1), False
    for number in range(draw(st.integers(0, 7))):
        node = _work(draw, f"n{number}", types)
        if node is None:
            continue
        name = f"n{number}"
        sources = {writers[field] for field in _read(node)}
        after[name] = {name}.union(*(after[source] for source in sources))
        often[name] = math.lcm(*(often[source] for source in sources)) * (
            draw(st.sampled_from([1, 1, 2])) if every else 1
        )
        if often[name] > 1:
            node["every"] = often[name]
        gates = node["use"] == "Gate" and not gated and "rollout" in after[name] and often[name] == 1
        if gates and draw(st.booleans()):
            node["gate"], gated = node["writes"]["keep"], True
        nodes[name] = node
        types |= {f: getattr(stub_nodes, node["use"]).output_ports[p].type for p, f in node["writes"].items()}
        writers |= dict.fromkeys(node["writes"].values(), name)
    log_probs = [f for f, t in types.items() if t == FieldType("Token", "float") and often[writers[f]] == 1]
    reads = {"response_mask": "mask"} | ({"log_probs": draw(st.sampled_from(log_probs))} if log_probs else {})
    nodes["update"] = {"use": "Update", "model": "policy", "pool": "gpu", "reads": reads, "writes": {}}
    order = draw(st.permutations(list(nodes)))
    return Made({name: nodes[name] for name in order}, {"models": models, "pools": pools}, types, writers)


def _work(draw: st.DrawFn, name: str, types: dict[str, FieldType]) -> dict[str, Any] | None:
    """A node whose ports read fields of their types; None where a port finds none."""
    use = draw(st.sampled_from(WORK))
    cls, reads = getattr(stub_nodes, use), {}
    for port in cls.input_ports.values():
        fitting = sorted(field for field, type_ in types.items() if type_ == port.type)
        if not fitting and not port.optional:
            return None
        if fitting and not (port.optional and draw(st.booleans())):
            one, many = (
                st.sampled_from(fitting),
                st.lists(st.sampled_from(fitting), min_size=1, max_size=3, unique=True),
            )
            reads[port.name] = draw(many if port.many else one)
    writes = {port: f"{name}_{port}" for port in cls.output_ports}
    node = {"use": use, "reads": reads, "writes": writes}
    if use == "Read":
        node |= {"model": draw(st.sampled_from(["policy", "reference"])), "pool": "gpu"}
    return node


def _read(node: dict[str, Any]) -> list[str]:
    return [f for fields in node["reads"].values() for f in ([fields] if isinstance(fields, str) else fields)]


def errors(document: dict[str, Any]) -> list[Problem]:
    return [problem for problem in Pipeline(document).check() if problem.severity == "error"]


@SLOW
@given(pipelines())
def test_a_pipeline_that_is_right_by_construction_has_no_error(made: Made) -> None:
    assert errors(made.document()) == []
    plan = made.pipeline().plan()
    assert {problem.code for problem in plan.warnings} <= {"FR030", "FR079"}
    place = {name: index for index, name in enumerate(plan.graph.order)}
    assert place.keys() == made.nodes.keys()
    for field, writer in made.writers.items():
        assert plan.graph.fields[field].type == made.types[field]
        assert Counter(plan.graph.fields[field].readers) == Counter(set(made.readers(field)))
        assert all(place.get(writer, -1) < place[reader] for reader in made.readers(field))
    readers = [name for name, node in made.nodes.items() if node["use"] == "Read" and node["model"] == "policy"]
    assert all(place[name] < place["update"] < place["sync"] for name in readers)
    wasted = {problem.place.path for problem in plan.warnings if problem.fact.startswith("nobody reads")}
    free = {name: node for name, node in made.nodes.items() if node["writes"] and "gate" not in node}
    unread = {f"nodes.{name}" for name, node in free.items() if not any(map(made.readers, node["writes"].values()))}
    assert wasted == unread


@SLOW
@given(pipelines(), st.data())
def test_the_order_of_declaration_changes_nothing(made: Made, data: st.DataObject) -> None:
    def turned(section: dict[str, Any]) -> dict[str, Any]:
        return dict(data.draw(st.permutations(list(section.items()))))

    other = replace(made, nodes=turned(made.nodes), sections={n: turned(s) for n, s in made.sections.items()})
    one, two = made.pipeline(), other.pipeline()
    assert as_data(one.plan()) == as_data(two.plan())
    assert one.plan().graph.order == two.plan().graph.order
    assert one.diff(two) == ()
    assert {problem.fact for problem in one.check()} == {problem.fact for problem in two.check()}


@SLOW
@given(pipelines(), st.data())
def test_without_a_producer_exactly_its_readers_are_blamed(made: Made, data: st.DataObject) -> None:
    dropped = data.draw(st.sampled_from(sorted({writer for writer in made.writers.values() if writer != "data"})))
    nodes = {name: node for name, node in made.nodes.items() if name != dropped}
    lost = {field for field, writer in made.writers.items() if writer == dropped}
    found = Counter(problem.fact for problem in errors(made.document(nodes)))
    needed = {(name, field) for field in lost for name in made.readers(field)}
    blamed = {f"nodes.{name} reads '{field}', which nothing writes" for name, field in needed if name != dropped}
    assert set(found) == blamed
    for name, field in needed - {(dropped, field) for field in lost}:
        ports = sum(
            field in (fields if isinstance(fields, list) else [fields]) for fields in nodes[name]["reads"].values()
        )
        assert 1 <= found[f"nodes.{name} reads '{field}', which nothing writes"] <= ports


@SLOW
@given(pipelines(), st.data())
def test_a_second_writer_is_one_error(made: Made, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(sorted(made.writers)))
    twin = data.draw(
        st.sampled_from([
            {"use": "Source", "reads": {}, "writes": {"value": field}},
            {"use": "Label", "reads": {}, "writes": {"label": field}},
        ])
    )  # fmt: skip
    nodes = dict(data.draw(st.permutations(list({**made.nodes, "twin": twin}.items()))))
    (problem,) = errors(made.document(nodes))
    assert problem.code == "FR021"
    assert f"'{field}'" in problem.fact
    assert "nodes.twin" in problem.fact


@SLOW
@given(pipelines(every=False), st.data())
def test_a_back_edge_prints_a_cycle_that_is_there(made: Made, data: st.DataObject) -> None:
    after = {name: _following(made, name) for name in made.nodes}
    lists = {"Mix": ("inputs", FieldType("Sample", "float")), "Blend": ("parts", FieldType("Token", "float"))}
    backward = [
        (start, field) for start, node in made.nodes.items() if node["use"] in lists for field, writer in
        made.writers.items() if writer in after[start] and made.types[field] == lists[node["use"]][1]
    ]  # fmt: skip
    assume(backward)
    start, field = data.draw(st.sampled_from(sorted(backward)))
    port = lists[made.nodes[start]["use"]][0]
    reads = {**made.nodes[start]["reads"], port: [*made.nodes[start]["reads"][port], field]}
    nodes = {**made.nodes, start: {**made.nodes[start], "reads": reads}}
    (problem,) = errors(made.document(nodes))
    assert problem.code == "FR040"
    steps = re.findall(r"(\w+) -\[([\w ]+)\]-> (?=(\w+))", problem.fact)
    assert steps[0][0] == steps[-1][2]
    assert [target for _, _, target in steps[:-1]] == [source for source, _, _ in steps[1:]]
    for source, label, target in steps:
        if label.startswith("gate "):
            assert nodes[source]["gate"] == label.removeprefix("gate ")
        elif label.startswith("weights of "):
            assert nodes[source]["model"] == nodes[target]["model"] == label.removeprefix("weights of ")
        else:
            assert label in nodes[source]["writes"].values()
            assert label in _read(nodes[target])


def _following(made: Made, name: str) -> set[str]:
    """A node and all that depend on its fields."""
    found, waiting = {name}, [name]
    while waiting:
        for field in made.nodes[waiting.pop()]["writes"].values():
            new = set(made.readers(field)) - found
            found |= new
            waiting += new
    return found


def _renamed(value: Any, old: str, new: str) -> Any:
    """The value with one word for another, wherever it stands."""
    text = re.sub(rf'(?<=[" ]){re.escape(old)}(?=[" ])', new, json.dumps(value))
    return json.loads(text)


def _summary(plan: Plan) -> dict[str, Any]:
    """What a plan says, whatever the order of names."""
    graph = plan.graph
    return {
        "levels": sorted(sorted(level) for level in graph.levels),
        "fields": sorted([f.name, str(f.type), f.writer, sorted(f.readers)] for f in graph.fields.values()),
        "edges": sorted([e.source, e.target, e.kind, e.label, e.distance] for e in graph.edges),
        "pools": sorted([pool.name, pool.workers, sorted(pool.logical)] for pool in plan.pools.values()),
        "outputs": sorted([name, sorted(map(sorted, sets))] for name, sets in plan.outputs.items()),
        "warnings": sorted([p.code, p.fact, p.fix, *p.notes] for p in plan.warnings),
    }


@SLOW
@given(pipelines(), st.data())
def test_a_field_that_is_renamed_everywhere_changes_nothing_else(made: Made, data: st.DataObject) -> None:
    old = data.draw(st.sampled_from(sorted(field for field, writer in made.writers.items() if writer != "data")))
    new = data.draw(st.sampled_from(["a_field", "zz-top", "Größe"]))
    nodes = _renamed(made.nodes, old, new)
    one, two = made.pipeline().plan(), Pipeline(made.document(nodes)).plan()
    quoted = json.loads(json.dumps(_summary(one)).replace(f"'{old}'", f"'{new}'"))
    assert _renamed(quoted, old, new) == _summary(two) or _sorted(_renamed(quoted, old, new)) == _sorted(_summary(two))


def _sorted(value: Any) -> Any:
    """Lists in the order of their text."""
    if isinstance(value, dict):
        return {name: _sorted(item) for name, item in value.items()}
    return sorted(map(_sorted, value), key=json.dumps) if isinstance(value, list) else value
