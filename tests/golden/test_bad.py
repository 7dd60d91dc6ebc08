"""Every kind of mistake: at least one file for each code, named after it, and beside it exactly what a user sees.

`flowrl check FILE` shows it, or the command in the first line of the file.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowrl.cli import app
from flowrl.errors import PipelineError, Problem
from flowrl.pipeline import Pipeline, load
from flowrl.spec.tree import Tree, child

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent / "bad"
DEFAULT = "../../../pipelines/grpo_sync.yaml"
FILES = sorted(FOLDER.glob("*.yaml"))
each_file = pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)


def command(file: Path) -> list[str]:
    """The words after `flowrl` that show the mistake."""
    first = file.read_text().partition("\n")[0]
    return first.removeprefix("# flowrl ").split() if first.startswith("# flowrl ") else ["check", file.name]


def option(arguments: list[str], name: str) -> list[str]:
    return [value for word, value in pairwise(arguments) if word == name]


def same_everywhere(text: str) -> str:
    """What a message says of this machine: the folder of the checkout and the number of its cores."""
    text = text.replace(f"{FOLDER}/", "")
    return re.sub(r"present: \d+ CPU", "present: 2 CPU", text)


def pipeline_of(file: Path) -> Pipeline:
    arguments = command(file)
    return load(arguments[1], option(arguments, "--set"), option(arguments, "--to-nodes"))


def problems_of(file: Path) -> tuple[Problem, ...]:
    """What the command of the file finds, as values."""
    from flowrl.launch import rehearse

    arguments, pipeline = command(file), pipeline_of(file)
    if arguments[0] == "check":
        return pipeline.check()
    try:
        if "--dry-run" in arguments:
            rehearse(pipeline.plan(), pipeline.reading, local=False, address=None)
        pipeline.run(local="--local" in arguments)
    except PipelineError as error:
        return error.problems
    raise AssertionError("the command of the file must be refused")


@each_file
def test_a_mistake_is_shown_with_place_fact_and_fix(file: Path, request: pytest.FixtureRequest) -> None:
    found = CliRunner().invoke(app, command(file), catch_exceptions=False)
    expected, shown = file.with_suffix(".txt"), same_everywhere(found.stderr)
    if request.config.getoption("--update-golden"):
        expected.write_text(shown)
    assert shown == expected.read_text(), f"{expected.name} has changed; `pytest --update-golden` accepts it"
    assert found.exit_code == (2 if "error[" in shown else 0)


@pytest.mark.parametrize("stem", ["FR020_missing_writer", "FR006_quoted_number", "FR030_no_divergence"])
def test_a_process_of_its_own_shows_the_same(stem: str) -> None:
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    run = [sys.executable, "-m", "flowrl", "check", f"{stem}.yaml"]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stderr == (FOLDER / f"{stem}.txt").read_text()
    assert done.returncode == (2 if "error[" in done.stderr else 0)


@each_file
def test_warnings_fail_only_if_strict(file: Path) -> None:
    arguments = command(file)
    if arguments[0] == "check":
        assert CliRunner().invoke(app, [*arguments, "--strict"]).exit_code == 2


@each_file
def test_what_check_refuses_run_refuses_in_the_same_words(file: Path) -> None:
    arguments = command(file)
    if arguments[0] == "check" and any(problem.severity == "error" for problem in problems_of(file)):
        found = CliRunner().invoke(app, ["run", *arguments[1:]], catch_exceptions=False)
        assert (found.exit_code, found.stdout) == (2, "")
        assert same_everywhere(found.stderr) == file.with_suffix(".txt").read_text()


# Every code has its file and its page.


def codes() -> set[str]:
    """All codes that the source can report."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "flowrl").rglob("*.py"))
    strings = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {text for text in strings if isinstance(text, str) and re.fullmatch(r"FR\d{3}", text)}


def test_every_code_has_a_file_that_shows_it() -> None:
    assert {file.name[:5] for file in FILES if file.stem != "five_at_once"} == codes()


@each_file
def test_a_file_shows_its_code_and_no_other_error(file: Path) -> None:
    if file.stem != "five_at_once":
        found = problems_of(file)
        assert file.name[:5] in {problem.code for problem in found}
        assert {problem.code for problem in found if problem.severity == "error"} <= {file.name[:5]}


def test_every_text_belongs_to_a_file() -> None:
    assert sorted(FOLDER.glob("*.txt")) == [file.with_suffix(".txt") for file in FILES]


def test_every_code_has_a_page() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    assert sorted(re.findall(r"^## (FR\d{3})", text, re.MULTILINE)) == sorted(codes())


def test_five_mistakes_in_one_file_are_five_errors_in_one_go() -> None:
    assert (FOLDER / "five_at_once.txt").read_text().count("error[") == 5


# Every place is there.


def resolves(tree: Tree, path: str) -> bool:
    """Whether a dotted path leads to a value of the merged document, or to a mapping that lacks its last key."""
    parts = [int(part[1:-1]) if part[0] == "[" else part for part in re.findall(r"\[\d+\]|[^.\[\]]+", path)]
    for left, part in enumerate(parts, 1 - len(parts)):
        step = child(tree, part)
        if step is None:
            return left == 0
        tree = step[1]
    return True


def test_paths_resolve_or_do_not() -> None:
    tree = load(DEFAULT).reading.tree
    assert all(resolves(tree, path) for path in ("", "nodes.rollout", "batch.prompts", "batch.size", "size"))
    assert not any(resolves(tree, path) for path in ("nodes.x.use", "batch.prompts.a.b", "models.policy.tags[0].x"))


@each_file
def test_every_place_exists_and_its_path_resolves(file: Path) -> None:
    pipeline, arguments = pipeline_of(file), command(file)
    for problem in problems_of(file):
        place = problem.place
        if place.file in ("--set", "--to-nodes"):
            lines = option(arguments, place.file)
        elif "cannot read" in problem.fact and not place.text:
            continue  # the file itself is missing
        else:
            lines = Path(place.file).read_text().splitlines()
        if place.text:
            assert place.text in lines if place.file.startswith("--") else lines[place.line - 1] == place.text
            assert 1 <= place.column < place.column + place.length <= len(place.text) + 1
        else:
            assert (place.line, place.column) == (1, 1)
        assert place.file == "--to-nodes" or resolves(pipeline.reading.tree, place.path), place.path
