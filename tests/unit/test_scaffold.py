"""`flowrl new`: what it writes works at once, and it writes over nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import flowrl
from flowrl import scaffold
from flowrl.cli import app
from flowrl.registry import find
from flowrl.scaffold import KINDS, SCHEMA
from flowrl.spec.load import load_file, shipped_pipelines
from flowrl.spec.tree import plain
from flowrl.testing import check_node

ROOT = Path(__file__).parents[2]


def yaml_styles() -> Iterator[dict[str, Any]]:
    """Ways to write one document."""
    for flow in (True, False, None):
        for style in (None, "'", '"', ">", "|"):
            for explicit in (True, False):
                yield {"default_flow_style": flow, "default_style": style, "explicit_start": explicit, "width": 30}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["new", *arguments])
    return done.exit_code, done.output


def written(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_node_passes_its_test_and_the_check_without_a_warning(folder: Path, kind: str) -> None:
    code, output = invoke("node", "mine_own", "--kind", kind)
    assert code == 0
    assert set(written(folder)) == {"mine_own.py", "test_mine_own.py", "mine_own.yaml"}
    assert output.splitlines()[:4] == ["wrote", "  mine_own.py", "  test_mine_own.py", "  mine_own.yaml"]
    assert [line.partition("#")[0].strip() for line in output.splitlines()[-3:]] == [
        "pytest test_mine_own.py", "flowrl check mine_own.yaml", "flowrl run mine_own.yaml --steps 2",
    ]  # fmt: skip
    pipeline = flowrl.load("mine_own.yaml")
    assert pipeline.check() == ()
    assert pipeline.plan().graph.nodes["mine_own"].cls.__name__ == "MineOwn"
    assert check_node(find("./mine_own.py:MineOwn", folder).load())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout
    lint = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "."]
    assert subprocess.run(lint, capture_output=True).returncode == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_test_of_a_new_node_can_fail(folder: Path, kind: str) -> None:
    invoke("node", "mine", "--kind", kind)
    broken = {
        "reward": ("max(len(got), len(right), 1)", "max(len(right), 1)"),
        "advantage": ("- 1\n", "- 0\n"),
        "filter": ("<= self.max_length", "< self.max_length"),
        "metric": (">= self.min_length", "> self.min_length"),
    }[kind]
    text = (folder / "mine.py").read_text()
    assert broken[0] in text
    (folder / "mine.py").write_text(text.replace(*broken))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout


def test_a_new_node_trains(folder: Path) -> None:
    invoke("node", "mine")
    sets = ["batch={prompts: 4, group: 2}", "nodes.actor_update.minibatch=4", "tracking=null", "run.steps=2"]
    flowrl.load("mine.yaml", sets).run(local=True, quiet=True)
    (metrics,) = folder.glob("runs/mine-*/metrics.jsonl")
    assert "time/mine" in json.loads(metrics.read_text().splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("3x", "a letter first"),
        ("my-reward", "cannot name a node"),
        ("a b", "cannot name a node"),
        ("é", "cannot name a node"),
        ("_x", "cannot name a node"),
        ("", "cannot name a node"),
        ("a/b", "cannot name a node"),
        ("a" * 61, "cannot name a node"),
        ("class", "means something else"),
        ("none", "means something else"),
        ("null", "means something else"),
        ("json", "'json' is a module of Python, which json.py would hide; such as `my_json` is free"),
        ("torch", "'torch' is a module already"),
        ("numpy", "'numpy' is a module already"),
        ("flowrl", "'flowrl' is a module already"),
        ("reward", "the pipeline has a node or a field 'reward' already; such as `my_reward` is free"),
        ("response_mask", "the pipeline has a node or a field"),
        ("total", "the pipeline has a node or a field"),
        ("data", "the pipeline has a node or a field 'data' already; such as `my_data` is free"),
        ("max_tokens", "the pipeline has a node or a field"),
        ("count", "means something else"),
        ("value_error", "the class would be called ValueError"),
        ("sample", "the class would be called Sample"),
        ("named_tuple", "the class would be called NamedTuple"),
    ],
)
def test_a_name_that_would_not_work_is_refused(folder: Path, name: str, said: str) -> None:
    code, output = invoke("node", "--", name)
    assert code == 2
    assert said in output
    assert written(folder) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_no_name_of_the_default_pipeline_can_be_used_again(folder: Path, kind: str) -> None:
    graph = flowrl.load("grpo_sync").plan().graph
    ports = {port for node in graph.nodes.values() for port in node.cls.input_ports}
    for name in {*graph.nodes, *graph.fields, *ports, "data"}:
        assert invoke("node", name, "--kind", kind)[0] == 2
    assert written(folder) == {}


def test_a_package_of_that_name_beside_it_would_hide_the_new_module(folder: Path) -> None:
    (folder / "there" / "mine").mkdir(parents=True)
    (folder / "there" / "mine" / "__init__.py").touch()
    code, output = invoke("node", "mine", "--folder", "there")
    assert (code, "'mine' is a module already (there/mine/__init__.py)" in output) == (2, True)


def test_a_pipeline_that_would_not_pass_its_check_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    templates = folder / "templates"
    shutil.copytree(scaffold.TEMPLATES, templates)
    (templates / "reward.yaml.txt").write_text(
        "extends: grpo_sync\nname: $name\nnodes: {$name: {use: '$use', flor: 1}}\n"
    )
    monkeypatch.setattr(scaffold, "TEMPLATES", templates)
    code, output = invoke("node", "mine", "--folder", "there")
    assert code == 2
    assert "error: 'mine' does not do: nodes.mine has no key 'flor'; such as `my_mine` is free" in output
    assert not (folder / "there").exists()


@pytest.mark.parametrize("name", ["LengthPenalty", "a", "two__parts", "nan", "off", "test_it", "x1"])
def test_unusual_names_work(folder: Path, name: str) -> None:
    code, output = invoke("node", name)
    assert code == 0, output
    assert flowrl.load(f"{name}.yaml").check() == ()


@pytest.mark.parametrize("file", ["mine.py", "test_mine.py", "mine.yaml"])
def test_a_file_that_is_there_is_named_and_nothing_is_written(folder: Path, file: str) -> None:
    (folder / file).write_text("precious")
    code, output = invoke("node", "mine")
    assert code == 2
    assert f"{file} exists already, and nothing is overwritten" in output
    assert written(folder) == {file: "precious"}


def test_a_new_node_in_a_package_is_tested_as_part_of_it(folder: Path) -> None:
    package = folder / "pkg" / "sub"
    package.mkdir(parents=True)
    for one in (package, package.parent):
        (one / "__init__.py").touch()
    code, output = invoke("node", "mine", "--folder", "pkg/sub")
    assert code == 0
    assert "  pytest pkg/sub/test_mine.py " in output
    assert "from pkg.sub.mine import Mine" in (package / "test_mine.py").read_text()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert flowrl.load("pkg/sub/mine.yaml").check() == ()


def test_a_folder_is_made_and_one_that_cannot_be_is_told(folder: Path) -> None:
    assert invoke("node", "mine", "--folder", "a/b")[0] == 0
    assert (folder / "a/b/mine.yaml").exists()
    (folder / "file").write_text("")
    code, output = invoke("node", "mine", "--folder", "file/b")
    assert code == 2
    assert "cannot write" in output


# -- pipelines


def document(path: Path) -> Any:
    tree = load_file(path, str(path)).tree
    assert tree is not None
    return plain(tree)


def resolved(path: str | Path) -> str:
    text = flowrl.load(path).resolved()
    return "\n".join(line for line in text.splitlines() if not line.startswith("name:"))


@pytest.mark.parametrize("source", shipped_pipelines())
def test_a_new_pipeline_means_what_its_source_means(folder: Path, source: str) -> None:
    code, output = invoke("pipeline", "mine", "--from", source)
    assert code == 0, output
    assert set(written(folder)) == {"mine.yaml", SCHEMA}
    text = (folder / "mine.yaml").read_text()
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={SCHEMA}"
    original = (ROOT / "pipelines" / f"{source}.yaml").read_text()
    changed = [pair for pair in zip(text.splitlines(), original.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(changed) <= 3  # the schema, the name, what it extends
    assert document(folder / "mine.yaml")["name"] == "mine"
    assert resolved("mine.yaml") == resolved(source)
    assert not [problem for problem in flowrl.load("mine.yaml").check() if problem.severity == "error"]
    jsonschema.validate(document(folder / "mine.yaml"), json.loads((folder / SCHEMA).read_text()))


@pytest.fixture
def source(folder: Path) -> Path:
    """A pipeline of the user's own, in a folder of its own, with every kind of path."""
    home = folder / "home"
    shutil.copytree(ROOT / "nodes/assets/arith-tiny", home / "weights")
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(64)]
    (home / "rows of mine.jsonl").write_text("\n".join(rows))
    (home / "n.py").write_text(
        "from typing import NamedTuple\nfrom flowrl import Node, Sample\n\n\nclass N(Node):\n"
        '    """N."""\n\n    scale: float = 1.0\n\n    class Out(NamedTuple):\n        reward: Sample[float]\n\n'
        "    def run(self, response: Sample[str]) -> Out:\n"
        "        return self.Out(Sample(response.rows, [self.scale] * len(response)))\n"
    )
    (home / "base.yaml").write_text("extends: grpo_sync\nname: base\n")
    path = home / "p.yaml"
    path.write_text(
        "# of mine\nextends: base.yaml  # kept\nparams: {file: rows of mine.jsonl, deep: ./weights}\n"
        "models: {reference: {path: weights}, policy: {path: $deep}}\n"
        "data: {train: {type: jsonl, path: $file}}\n"
        "nodes:\n  reward: {use: 'n.py:N', scale: 0.5}  # and mine\n"
    )
    return path


def test_relative_paths_of_a_copy_lead_where_they_led(folder: Path, source: Path) -> None:
    assert flowrl.load(source).check() == ()
    code, output = invoke("pipeline", "copy", "--from", str(source), "--folder", "there/deep")
    assert code == 0, output
    assert (folder / "there/deep/copy.yaml").read_text() == (
        f"# yaml-language-server: $schema={SCHEMA}\n"
        "# of mine\nname: copy\nextends: ../../home/base.yaml  # kept\n"
        'params: {file: "../../home/rows of mine.jsonl", deep: ../../home/weights}\n'
        "models: {reference: {path: ../../home/weights}, policy: {path: $deep}}\n"
        "data: {train: {type: jsonl, path: $file}}\n"
        "nodes:\n  reward: {use: ../../home/n.py:N, scale: 0.5}  # and mine\n"
    )
    assert flowrl.load("there/deep/copy.yaml").check() == ()
    one, two = (flowrl.load(path).plan().document for path in (source, "there/deep/copy.yaml"))
    assert (one.models, one.data, one.nodes) == (two.models, two.data, two.nodes)


def test_the_schema_beside_a_copy_knows_the_users_own_nodes(folder: Path, source: Path) -> None:
    invoke("pipeline", "copy", "--from", "home/p.yaml", "--folder", "home")
    schema = json.loads((folder / "home" / SCHEMA).read_text())
    data = document(folder / "home/copy.yaml")
    jsonschema.validate(data, schema)
    data["nodes"]["reward"]["scael"] = 1.0
    assert not jsonschema.Draft202012Validator(schema).is_valid(data)


def test_in_the_same_folder_a_copy_keeps_its_paths(folder: Path, source: Path) -> None:
    assert invoke("pipeline", "copy.yaml", "--from", str(source), "--folder", str(source.parent))[0] == 0
    lines = source.read_text().splitlines()
    copy = (source.parent / "copy.yaml").read_text().splitlines()
    assert [line.replace("./base.yaml", "base.yaml") for line in copy if line in lines or "extends" in line] == lines


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("{extends: grpo_sync, batch: {prompts: 16}}", "{name: mine, extends: grpo_sync"),
        ("{extends: grpo_sync,\n batch: {prompts: 16}, name: old}", "{extends: grpo_sync,"),
        ("{ name: 'old', extends: grpo_sync }", "{ name: mine, extends"),
        ("---\n{extends: grpo_sync}\n...\n", "---"),
        ("%YAML 1.2\n---\nextends: grpo_sync\n", "%YAML 1.2"),
        ("extends: grpo_sync\nname: \"old\"  # mine\n", "extends: grpo_sync"),
        ("extends: grpo_sync\nname: 'old'\n", "extends: grpo_sync"),
        ("extends: grpo_sync\nbatch: {prompts: 16}\nname: old", "extends: grpo_sync"),
        ("  extends: grpo_sync\n  batch: {prompts: 16}\n", "  name: mine"),
        ("'name': old\n\"extends\" : grpo_sync\n", "'name': mine"),
        ("? extends\n: grpo_sync\n", "name: mine"),
        ("extends: grpo_sync\nparams: {name: x}\nnodes: {rollout: {max_tokens: 4}}\n", "name: mine"),
        ("params: {n: old}\nname: $n\nextends: grpo_sync\n", "params: {n: old}"),
        ("\ufeff# Größe ✓\nextends: grpo_sync\nname: ab\r\n", "# Größe ✓"),
        # what cannot be changed in its place is extended
        ("extends: grpo_sync\nname: >-\n  old\n", ""),
        ("extends: grpo_sync\nname: |-\n  old\nbatch: {prompts: 16}\n", ""),
        ("extends: grpo_sync\nname:\n  old\n  \n", "extends: grpo_sync"),
        ("extends: grpo_sync\nname: \"old\\\n  er\"\n", ""),
        ("extends: grpo_sync\nname: &n old\ntracking: {type: mlflow, experiment: *n}\n", ""),
        ("&all\nextends: grpo_sync\n", ""),
    ],
)  # fmt: skip
def test_a_source_of_any_form_gives_a_pipeline_that_means_the_same(folder: Path, text: str, first: str) -> None:
    (folder / "home").mkdir()
    (folder / "home" / "old.yaml").write_text(text, encoding="utf-8")
    assert flowrl.load("home/old.yaml").plan()
    code, output = invoke("pipeline", "mine", "--from", "home/old.yaml")
    assert code == 0, output
    lines = (folder / "mine.yaml").read_text().splitlines()
    assert (
        lines[1] == first
        or (first and lines[1].startswith(first))
        or (not first and lines[2:] == ["extends: ./home/old.yaml", "name: mine"])
    )
    assert document(folder / "mine.yaml")["name"] == "mine"
    assert resolved("mine.yaml") == resolved("home/old.yaml")


@pytest.mark.parametrize("name", ["2024-01-01", "123", "null", "true", "1e3", "0x1F", "a.b"])
def test_a_name_that_yaml_takes_for_something_else_stays_a_name(folder: Path, name: str) -> None:
    for source in ("name: old\nextends: grpo_sync\n", "extends: grpo_sync\nname: >-\n  old\n"):
        (folder / "old.yaml").write_text(source)
        assert invoke("pipeline", name, "--from", "./old.yaml")[0] == 0
        assert flowrl.load(f"{name}.yaml").plan().document.name == name
        (folder / f"{name}.yaml").unlink()


@given(st.sampled_from(list(yaml_styles())), st.booleans())
@settings(deadline=None, max_examples=60)
def test_any_way_to_write_a_document_can_be_copied(text: str, has_name: bool) -> None:
    data = {"params": {"deep": "./there"}, "extends": "grpo_sync", "run": {"dir": "a b: c"}}
    written_so = yaml.dump(data | ({"name": "old"} if has_name else {}), **text)
    with TemporaryDirectory() as place:
        (Path(place) / "old.yaml").write_text(written_so)
        path, _ = scaffold.new_pipeline("mine", f"{place}/old.yaml", Path(place) / "new")
        assert resolved(path) == resolved(f"{place}/old.yaml")
        assert flowrl.load(path).plan().document.name == "mine"


@pytest.mark.parametrize("in_the_way", [".flowrl", ".flowrl/pipeline.schema.json"])
def test_where_the_schema_cannot_be_written_nothing_is(folder: Path, in_the_way: str) -> None:
    for path in (folder / in_the_way, folder / "deep" / in_the_way):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name == ".flowrl":
            path.write_text("precious")
        else:
            path.mkdir(parents=True)
    before = written(folder)
    for where, shown in ((".", ""), ("deep", "deep/")):
        code, output = invoke("pipeline", "mine", "--folder", where)
        reason = f"{shown}.flowrl is no folder" if in_the_way == ".flowrl" else "Is a directory"
        assert (code, output) == (2, f"error: cannot write {shown}{SCHEMA}: {reason}\n")
    assert written(folder) == before


def test_the_help_says_what_a_new_pipeline_holds(folder: Path) -> None:
    output = " ".join(invoke("pipeline", "--help")[1].split())
    assert "a copy of a pipeline's file to change" in output
    assert "What the file extends the copy extends, too" in output
    assert invoke("pipeline", "mine", "--from", "qwen_gsm8k_8gpu")[0] == 0
    assert document(folder / "mine.yaml")["extends"] == "grpo_sync"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mine", "--from", "grpo_snyc"), "did you mean 'grpo_sync'?"),
        (("mine", "--from", "./no.yaml"), "there is no pipeline './no.yaml'"),
        (("a/b",), "cannot name a pipeline"),
        (("-x",), "cannot name a pipeline"),
        (("é",), "cannot name a pipeline"),
    ],
)
def test_what_cannot_be_copied_is_told(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    code, output = invoke("pipeline", *arguments[1:], "--", arguments[0])
    assert code == 2
    assert said in output
    assert written(folder) == {}


def test_a_source_that_is_no_yaml_is_told_like_any_pipeline(folder: Path) -> None:
    (folder / "bad.yaml").write_text("a: [1\n")
    code, output = invoke("pipeline", "mine", "--from", "bad.yaml")
    assert code == 2
    assert "error[FR002] bad.yaml:1:4" in output
    assert not (folder / "mine.yaml").exists()


def test_a_pipeline_that_is_there_stays(folder: Path) -> None:
    (folder / "mine.yaml").write_text("precious")
    code, output = invoke("pipeline", "mine")
    assert code == 2
    assert "mine.yaml exists already" in output
    assert written(folder) == {"mine.yaml": "precious"}


# -- the schema as a command


def test_the_schema_is_printed_or_written(folder: Path, source: Path) -> None:
    printed = CliRunner().invoke(app, ["schema"])
    assert printed.exit_code == 0
    assert printed.output == (ROOT / "flowrl/schema/pipeline.json").read_text()
    done = CliRunner().invoke(app, ["schema", str(source), "--output", "deep/schema.json"])
    assert done.exit_code == 0
    assert "n.py:N" in (folder / "deep/schema.json").read_text()
    assert done.stderr == "wrote deep/schema.json\n"
    missing = CliRunner().invoke(app, ["schema", "no.yaml"])
    assert missing.exit_code == 2
    assert "error[FR001]" in missing.output
    (folder / "file").write_text("")
    assert CliRunner().invoke(app, ["schema", "--output", "file/x.json"]).exit_code == 2


def test_what_a_schema_cannot_know_is_said_beside_it(folder: Path) -> None:
    (folder / "broken.py").write_text("from flowrl import Node\n\n\nclass A(Node):\n    def run(self, x): ...\n")
    (folder / "fine.py").write_text("from flowrl import Node\n\n\nclass A(Node):\n    def run(self) -> None: ...\n")
    (folder / "u.yaml").write_text(
        "extends: grpo_sync\nname: u\nnodes:\n  a: {use: './broken.py:A'}\n  b: {use: './fine.py:A'}\n"
        "  c: {use: 'no_such:B'}\n  d: {use: ./fine.py}\n  e: {use: reward.exact_mach}\n  f: {use: $f}\n"
    )
    done = CliRunner().invoke(app, ["schema", "u.yaml"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["$defs"][".-fine.py-A"]
    notes = done.stderr.splitlines()
    assert [note.partition(": the schema does not know ")[0] for note in notes] == [
        f"note: u.yaml:{line}:12" for line in (4, 6, 7, 8)
    ]
    assert [note.partition("know nodes.")[2][:40] for note in notes] == [
        f"a: {folder}/broken.py:4: A.run: 'x' has no type hint"[:40],
        "c: no module named 'no_such'",
        "d: './fine.py' names a file and no class"[:40],
        "e: no library node is called 'reward.exa"[:40],
    ]
