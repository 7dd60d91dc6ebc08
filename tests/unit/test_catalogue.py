"""`flowrl nodes`: the catalogue, a node's page, and both for tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jsonschema
import pytest
from pydantic import BaseModel, Field, create_model
from typer.testing import CliRunner

import flowrl
from flowrl.batch import Sample
from flowrl.catalogue import entry_of, limits_of, smallest, smallest_parameters, type_of
from flowrl.cli import app
from flowrl.node import Node
from flowrl.registry import find, library_names
from flowrl.spec.load import load_text
from flowrl.spec.tree import Source, plain

ROOT = Path(__file__).parents[2]


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["nodes", *arguments])
    return done.exit_code, done.output


def test_the_catalogue_names_every_node_and_fits_the_page() -> None:
    code, output = invoke()
    assert code == 0
    lines = output.splitlines()
    assert max(map(len, lines)) <= 100
    assert all(line == line.rstrip() and "\x1b" not in line for line in lines)
    names = [line.split()[0] for line in lines if line.startswith("  ") and "." in line.split()[0]]
    assert [name for name in names if name in library_names()] == library_names()
    families = [line for line in lines[1:] if line and not line.startswith((" ", "`"))]
    assert families == sorted({name.partition(".")[0] for name in library_names()})


def test_the_catalogue_says_what_a_node_does_reads_and_writes() -> None:
    start = next(line for line in invoke()[1].splitlines() if "reward.exact_match" in line)
    assert start.split() == [
        "reward.exact_match",
        "Score",
        "1.0",
        "where",
        "the",
        "response",
        "answer",
        "reward",
    ]


def test_a_page_has_all_that_a_line_of_yaml_needs() -> None:
    code, output = invoke("update.policy")
    assert code == 0
    words = [line.split() for line in output.splitlines()]
    assert ["minibatch", "int", ">=", "1", "required", "Prompts", "of", "one", "optimizer", "step."] in words
    assert any(line[:8] == ["kl", "k1", "|", "k2", "|", "k3", "|", "abs"] and "Estimator" in line for line in words)
    assert any(line[:4] == ["kl_coef", "float", ">=", "0"] for line in words)
    assert ["prompt_ids", "PromptToken[int]"] in words
    assert "old_log_probs       Token[float]      optional: read if some node writes it" in output
    assert "ref_log_probs       Token[float]      optional: kl_coef decides; not read with the defaults" in output
    assert "max_tokens          Step[int]         optional: aggregation decides; not read with the defaults" in output
    assert "batch: it is called with the batch that the schedule cuts" in output
    assert "accelerator: it needs a `pool:`" in output
    assert f"{ROOT}/" in output
    assert output.endswith("  policy: {use: update.policy, model: policy, pool: train, minibatch: 1}\n")


@pytest.mark.parametrize("name", library_names())
def test_every_page_fits_and_its_line_reads_back(name: str) -> None:
    _, output = invoke(name)
    lines = output.splitlines()
    assert max(map(len, lines[: lines.index("source")])) <= 100
    tree = load_text(lines[-1].strip(), Source("f")).tree
    assert tree is not None
    ((_, node),) = plain(tree).items()
    assert node["use"] == name
    parameters = {key: value for key, value in node.items() if key not in ("use", "model", "pool", "reads")}
    find(name, ROOT).load()(**parameters)


MODULE = '''
from typing import Literal, NamedTuple
from pydantic import Field
from flowrl import Node, Sample


class Mine(Node):
    """One line.

    And another paragraph.
    """

    scope = "group"
    mode: Literal["a", "b"] = "a"
    """Which."""
    pair: tuple[float, float] = Field((0.5, 1.0), strict=False)
    table: dict[str, int] = {}
    text: str = "null"
    names: list[str] | None = None
    must: int = Field(gt=2, lt=9)

    class Out(NamedTuple):
        y: Sample[float]

    def needs(self) -> dict[str, bool]:
        return {"extra": self.mode == "b"}

    def run(self, reward: Sample[float], many: list[Sample[float]], extra: Sample[int] | None = None) -> Out:
        return self.Out(reward)
'''


@pytest.mark.parametrize("use", ["./my_file.py:Mine", "my_file:Mine"])
def test_a_class_of_the_users_own_is_explained(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_file.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    entry = entry_of(use, tmp_path)
    assert entry.summary == "One line."
    assert entry.docstring == "One line.\n\nAnd another paragraph."
    shown = {p.name: (p.type, p.default, p.limits) for p in entry.parameters}
    assert shown == {
        "mode": ("a | b", "a", ""),
        "pair": ("[float, float]", "[0.5, 1.0]", ""),
        "table": ("mapping to int", "{}", ""),
        "text": ("str", '"null"', ""),
        "names": ("list of str | null", "null", ""),
        "must": ("int", "", "> 2, < 9"),
    }
    assert entry.parameters[0].description == "Which."
    assert [(r.name, r.type, r.optional, r.switched_by, r.read_by_default) for r in entry.reads] == [
        ("reward", "Sample[float]", False, (), True),
        ("many", "list of Sample[float]", False, (), True),
        ("extra", "Sample[int]", True, ("mode",), False),
    ]
    assert entry.source == str(tmp_path / "my_file.py")
    assert entry.snippet == f"mine: {{use: {use}, must: 3, reads: {{many: [many_1, many_2]}}}}"
    assert "And another paragraph." in invoke(use)[1]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reward.exact_mach", "did you mean 'reward.exact_match'?"),
        ("reward", "did you mean"),
        ("flowrl.node:Nod", "did you mean 'Node'?"),
        ("./nothing.py:X", "cannot read the file './nothing.py'"),
        ("json:loads", "is no flowrl.Node"),
    ],
)
def test_a_name_that_is_none_is_told_with_the_nearest(name: str, said: str) -> None:
    code, output = invoke(name)
    assert code == 2
    assert said in output or name in ("reward", "flowrl.node:Nod")


def test_for_tools_the_whole_catalogue_is_stable_data() -> None:
    code, output = invoke("--format", "json")
    assert code == 0
    entries = {entry["use"]: entry for entry in json.loads(output)["nodes"]}
    assert list(entries) == library_names()
    for name, entry in entries.items():
        cls = find(name, ROOT).load()
        assert set(entry) == {
            "use", "summary", "docstring", "parameters", "reads", "writes", "scope", "weights", "head", "cardinality",
            "pure", "device", "source", "snippet", "json_schema",
        }  # fmt: skip
        assert set(entry["json_schema"]["properties"]) == set(cls.model_fields)
        jsonschema.Draft202012Validator.check_schema(entry["json_schema"])
        assert entry["writes"] == {port: str(one.type) for port, one in cls.output_ports.items()}
    (one,) = json.loads(invoke("reward.exact_match", "--format", "json")[1])["nodes"]
    assert one == entries["reward.exact_match"]
    assert one["reads"][0] == {
        "name": "response", "type": "Sample[str]", "optional": False, "switched_by": [], "read_by_default": True,
    }  # fmt: skip


class Inner(BaseModel):
    """A group of settings."""

    a: int = Field(ge=3)
    b: str = "x"


@pytest.mark.parametrize(
    ("hint", "limits", "shown", "value"),
    [
        (int, {}, "int", 1),
        (int, {"ge": 0}, "int", 0),
        (int, {"gt": 4}, "int", 5),
        (int, {"le": -3}, "int", -4),
        (float, {"gt": 0}, "float", 1.0),
        (float, {"gt": 0, "lt": 1}, "float", 0.5),
        (float, {"ge": -2, "le": 2}, "float", -2.0),
        (bool, {}, "bool", False),
        (str, {}, "str", "a"),
        (str, {"min_length": 3}, "str", "aaa"),
        (Literal["x", "y"], {}, "x | y", "x"),
        (Literal["x"], {}, "x", "x"),
        (list[int], {"min_length": 2}, "list of int", [1, 1]),
        (list[str], {}, "list of str", []),
        (tuple[int, float], {}, "[int, float]", [1, 1.0]),
        (int | None, {}, "int | null", 1),
        (Inner, {}, "{a, b}", {"a": 3}),
        (dict[str, Inner], {}, "mapping to {a, b}", {}),
        (Any, {}, "any", None),
    ],
)
def test_a_required_parameter_gets_the_smallest_value_that_is_allowed(
    hint: Any, limits: dict[str, Any], shown: str, value: Any
) -> None:
    model = create_model("M", x=(hint, Field(**limits)))
    schema = model.model_json_schema()
    one = schema["properties"]["x"]
    assert type_of(one, schema) == shown
    assert smallest(one, schema) == value
    model.model_validate({"x": smallest(one, schema)})
    assert bool(limits_of(one)) == bool(limits) or hint == tuple[int, float]


def test_parameters_that_smallest_values_do_not_fit_are_left_to_the_user() -> None:
    class Odd(Node):
        """Needs a code that no limit shows."""

        code: str = Field(pattern="^z+$")

        class Out(NamedTuple):
            y: Sample[float]

        def needs(self) -> dict[str, bool]:
            return {"extra": False}

        def run(self, reward: Sample[float], extra: Sample[float] | None = None) -> Out:
            return self.Out(reward)

    assert smallest_parameters(Odd) == {"code": "a"}
    with pytest.raises(ValueError, match="code"):
        Odd(**smallest_parameters(Odd))


def test_flowrl_names_what_users_of_nodes_import() -> None:
    assert {"Node", "Sample", "Token", "Prompt", "metric"} <= set(flowrl.__all__)
