"""The JSON Schema for editors: current, complete, and of one mind with the check."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flowrl.errors import Problem
from flowrl.node import ENGINE_KEYS
from flowrl.pipeline import Pipeline
from flowrl.registry import find, library_names
from flowrl.spec.load import load_file, load_text
from flowrl.spec.schema import SCHEMA_FILE, nodes_used, pipeline_schema, schema_text
from flowrl.spec.tree import Source, Tree, plain

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([*ROOT.glob("pipelines/*.yaml"), *ROOT.glob("examples/*/*.yaml")])
LIBRARY = jsonschema.Draft202012Validator(pipeline_schema())

CROSS_FIELD = (
    ("models.*", "is too narrow to train in"),  # dtype against trainable
    ("pools.*", "a pool that shares"),  # shares against the size of a pool
    ("data.*", "must be below high"),  # low against high
    ("nodes.actor_update", "dual_clip must be above"),  # dual_clip against clip_high
    ("nodes.actor_update.kl", "kl has no effect"),  # kl against kl_coef
    ("nodes.*.on_error", "cannot"),  # the policy for failures against the kind of node
)
"""Rules about two values, as path and words: a schema judges each value alone."""


def trees(*files: Path) -> list[Tree]:
    return [tree for file in files if (tree := load_file(file, str(file)).tree) is not None]


def document(file: Path) -> dict[str, Any]:
    tree = load_file(file, str(file)).tree
    assert tree is not None
    return dict(plain(tree))


def yaml(text: str) -> Any:
    tree = load_text(text, Source("f")).tree
    assert tree is not None
    return plain(tree)


def test_it_is_a_valid_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(pipeline_schema())


def test_the_committed_file_is_current() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), (
        f"write it again: flowrl schema --output {SCHEMA_FILE.relative_to(ROOT)}"
    )


@pytest.mark.parametrize("file", SHIPPED, ids=[str(file.relative_to(ROOT)) for file in SHIPPED])
def test_shipped_files_are_right(file: Path) -> None:
    LIBRARY.validate(document(file))
    jsonschema.validate(document(file), pipeline_schema(nodes_used(trees(file)).classes))


@pytest.mark.parametrize("name", library_names())
def test_a_library_node_takes_its_parameters_and_the_engine_keys_and_nothing_else(name: str) -> None:
    cls = find(name, ROOT).load()
    taken = pipeline_schema()["$defs"][name]
    assert set(taken["properties"]) == set(cls.model_fields) | ENGINE_KEYS
    assert taken["additionalProperties"] is False
    for key, field in cls.model_fields.items():
        described = taken["properties"][key]
        assert "description" in described or "$ref" in described["anyOf"][0]
        assert field.is_required() or field.default is None or "default" in described


def overlay(node: str) -> Any:
    return yaml(f"extends: grpo_sync\nnodes:\n  a: {node}\n")


@pytest.mark.parametrize(
    "node",
    [
        "{use: reward.exact_match, strip: false, every: 2}",
        "{use: update.policy, loss: './mine.py:loss', loss_options: {anything: 3}}",
        "{use: reward.exact_match, strip: $strip, ignore_case: null}",
        "{use: reward.exact_match, reads: {answer: solution}, writes: {reward: raw}}",
        "{use: rollout.generate, script: {texts: [a, null]}}",
        "{use: rollout.generate, script: $script, reads: $reads}",
        "{use: 'my_pkg.nodes:Mine', anything: 3}",
        "{use: ./mine.py:Mine, anything: 3}",
        "{use: $use, anything: 3}",
        "{anything: 3}",
        "{every: 2}",
        "null",
    ],
)
def test_what_may_be_right_passes(node: str) -> None:
    assert LIBRARY.is_valid(overlay(node))


@pytest.mark.parametrize(
    "node",
    [
        "{use: reward.exact_match, stirp: false}",
        "{use: reward.exact_match, strip: 1}",
        "{use: reward.exact_match, reads: {anwser: solution}}",
        "{use: reward.exact_match, writes: {score: raw}}",
        "{use: reward.exact_mach}",
        "{use: update.policy, minibatch: 0}",
        "{use: update.policy, kl: k4}",
        "{use: update.policy, loss: clap}",
        "{use: rollout.generate, script: {text: [a]}}",
        "{use: reward.weighted_sum, coefficients: [1, null]}",
        "{every: 0}",
        "{use: './mine.py:Mine', every: often}",
        "3",
    ],
)
def test_what_cannot_be_right_does_not_pass(node: str) -> None:
    assert not LIBRARY.is_valid(overlay(node))


def test_names_of_the_library_are_offered_with_what_they_do() -> None:
    offered = pipeline_schema()["$defs"]["NodeSpec"]["properties"]["use"]["anyOf"]
    names = {choice["const"]: choice["description"] for choice in offered if "const" in choice}
    assert sorted(names) == library_names()
    assert all(names.values())


def test_nodes_of_the_users_own_are_known_where_their_files_are_given(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from typing import Callable, NamedTuple\n"
        "from flowrl import Node, Sample\n"
        "class Mine(Node):\n"
        "    scale: float = 0.5\n"
        "    class Out(NamedTuple):\n"
        "        y: Sample[float]\n"
        "    def run(self, reward: Sample[float]) -> Out:\n"
        "        return self.Out(reward)\n"
        "class Odd(Mine):\n"
        "    how: Callable[[], int] | None = None\n"
    )
    file = tmp_path / "p.yaml"
    file.write_text("extends: grpo_sync\nnodes: {a: {use: ./mine.py:Mine}, b: {use: './gone.py:X'}, c: null}\n")
    other = tmp_path / "q.yaml"
    other.write_text("nodes: {a: {use: './mine.py:Odd'}, b: {use: $x}, c: 3}\n")
    used = nodes_used(trees(file, other))
    assert [note.partition(": ")[0] for note in used.notes] == [f"{file}:2:44"]
    assert "the schema does not know nodes.b: cannot read the file './gone.py'" in used.notes[0]
    schema = pipeline_schema(used.classes)
    jsonschema.Draft202012Validator.check_schema(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    assert valid(overlay("{use: './mine.py:Mine', scale: 1.0}"))
    assert not valid(overlay("{use: './mine.py:Mine', scael: 1.0}"))
    assert valid(overlay("{use: './mine.py:Odd', how: what}"))  # a type without a schema
    assert not valid(overlay("{use: './mine.py:Odd', hwo: what}"))
    assert valid(overlay("{use: './gone.py:X', anything: 3}"))


def test_a_name_that_means_two_classes_stays_open(tmp_path: Path) -> None:
    files = []
    for folder, parameter in ((tmp_path / "a", "x"), (tmp_path / "b", "y")):
        folder.mkdir()
        (folder / "n.py").write_text(
            "from flowrl import Node, Sample\n"
            f"class N(Node):\n    {parameter}: int = 1\n    def run(self, reward: Sample[float]) -> None: ...\n"
        )
        files.append(folder / "p.yaml")
        files[-1].write_text("nodes: {a: {use: './n.py:N'}}\n")
    assert set(nodes_used(trees(files[0])).classes) == {"./n.py:N"}
    classes, notes = nodes_used(trees(*files))
    assert classes == {}
    assert notes == (f"{files[1]}:1:18: the schema does not know nodes.a: './n.py:N' means two classes",)


FULL = document(ROOT / "pipelines/grpo_sync.yaml") | yaml(
    "checkpoint: {every: 5}\n"
    "tracking: [{type: mlflow, experiment: e, uri: null}, {type: none}]\n"
    "schedule: {mode: separate_async, max_staleness: 1, stale: drop, updates_per_sync: 1}\n"
)
FULL["pools"]["spare"] = {"workers": 1, "nodes": 1, "cpus_per_worker": 0.5, "resources": {"disk": 1.0}}
FULL["models"]["policy"] |= {"dtype": "float32", "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95], "max_grad_norm": 2.0}}
FULL["nodes"]["reward"] |= {
    "strip": True,
    "tags": ["a"],
    "on_error": "drop",
    "timeout": 3.0,
    "reads": {"answer": "answer"},
}
FULL["nodes"]["rollout"] |= {
    "script": {"texts": ["1", None], "seconds": [0.0], "vocabulary": 9},
    "chat_template": False,
}
FULL["nodes"]["sum"] = {"use": "reward.weighted_sum", "reads": {"rewards": ["reward"]}, "coefficients": [1.0, 2]}
FULL["nodes"]["actor_update"] |= {"kl": "k1", "epochs": 1, "clip_low": 0.1, "shuffle": False}
BEFORE = frozenset((problem.code, problem.place.path, problem.fact) for problem in Pipeline(FULL).check())

JUNK = st.one_of(
    st.sampled_from(
        [None, True, False, -1, 0, 1, 7, 10**30, -0.5, 0.5, 1.5, 1e-9, "", "junk", "3", "a.b", "sync", "é"]
    ),
    st.sampled_from(
        [[], [1], ["x"], [0.5, 0.5], [[]], {}, {"a": 1}, {"a": {"b": None}}, {"type": "x"}, {"use": "a:b"}]
    ),
    # A whole float is an integer to JSON Schema and none to flowrl; JSON has no infinity and no NaN.
    st.integers() | st.floats(allow_nan=False, allow_infinity=False).filter(lambda x: not x.is_integer()),
    st.text(alphabet="ab1_-. ", max_size=4),
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document; none inside of `params`, whose values have no type of their own."""
    if path:
        yield path
    if path == ("params",):
        return
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def changed(path: tuple[Any, ...], how: str, junk: Any) -> dict[str, Any]:
    data = copy.deepcopy(FULL)
    here: Any = data
    for part in path[:-1]:
        here = here[part]
    if how == "drop":
        del here[path[-1]]
    elif how == "add" and isinstance(here[path[-1]], dict):
        here[path[-1]]["unheard_of"] = junk
    else:
        here[path[-1]] = junk
    return data


def errors(data: dict[str, Any]) -> list[Problem]:
    """What is wrong with the data and was not wrong before."""
    found = [problem for problem in Pipeline(data).check() if problem.severity == "error"]
    return [problem for problem in found if (problem.code, problem.place.path, problem.fact) not in BEFORE]


def without_nulls(data: Any) -> Any:
    """What the check sees: it takes a null out before it asks whether anybody knows the key."""
    if isinstance(data, dict):
        return {key: without_nulls(value) for key, value in data.items() if value is not None}
    return [without_nulls(value) for value in data] if isinstance(data, list) else data


def is_cross_field(problem: Problem) -> bool:
    return any(
        re.fullmatch(path.replace(".", r"\.").replace("*", ".*"), problem.place.path) and words in problem.fact
        for path, words in CROSS_FIELD
    )


PLACES = sorted(paths(FULL), key=str)


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(PLACES), st.sampled_from(["drop", "replace", "add"]), JUNK)
@example(("nodes", "sum", "coefficients", 0), "replace", None)
@example(("nodes",), "replace", {})
@example(("nodes", "rollout", "script"), "add", 1)
@example(("pools", "generate"), "add", 1)
@example(("data",), "add", {"type": "arithmetic"})
def test_json_schema_and_pydantic_agree(path: tuple[Any, ...], how: str, junk: Any) -> None:
    data = changed(path, how, junk)
    found = errors(data)
    of_a_value = [p for p in found if p.code in ("FR005", "FR006", "FR007") and not is_cross_field(p)]
    refused = [error.message for error in LIBRARY.iter_errors(without_nulls(data))]
    if of_a_value:
        assert refused, [problem.render() for problem in of_a_value]
    if refused:
        assert found, refused


@pytest.mark.parametrize(
    "place",
    [place for place in PLACES if isinstance(place[-1], str) and place[-1] != "use"],
    ids=lambda path: ".".join(map(str, path)),
)
def test_null_may_stand_for_any_value_of_a_mapping_and_so_may_a_param(place: tuple[Any, ...]) -> None:
    assert LIBRARY.is_valid(changed(place, "replace", None))
    assert LIBRARY.is_valid(changed(place, "replace", "$base")) or place == ("extends",)


@pytest.mark.parametrize("place", PLACES, ids=lambda path: ".".join(map(str, path)))
def test_an_unknown_key_is_refused_in_every_section_where_the_check_refuses_it(place: tuple[Any, ...]) -> None:
    data = changed(place, "add", 1)
    if any(problem.code == "FR005" for problem in errors(data)):
        assert not LIBRARY.is_valid(data)


def test_the_text_is_json_without_infinities() -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    assert json.loads(schema_text(), parse_constant=refuse) == json.loads(json.dumps(pipeline_schema()))
