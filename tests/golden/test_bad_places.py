"""The same mistakes written elsewhere: in a file that is extended, or in `--set`. They are shown where they are."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import Place, Problem
from flowrl.pipeline import load
from flowrl.spec.load import load_text
from flowrl.spec.tree import Source, plain

FOLDER = Path(__file__).parent / "bad"
DEFAULT = Path(__file__).parents[2] / "pipelines" / "grpo_sync.yaml"
HEAD = "extends: ../../../pipelines/grpo_sync.yaml\n"
FILES = [file for file in sorted(FOLDER.glob("*.yaml")) if file.read_text().startswith(HEAD)]
NOT_YAML = ("FR003", "FR004")
"""Mistakes that are lost when the values are written anew."""


def sections(text: str) -> dict[str, str]:
    """The lines of each top-level key."""
    found: dict[str, str] = {}
    for line in text.splitlines(keepends=True):
        if line[0] not in " #":
            name = line.partition(":")[0]
        found[name] = found.get(name, "") + line
    return found


def words(problem: Problem, *folders: Path) -> tuple[str, ...]:
    """What is said, whatever folder and line it is about."""
    said = (problem.code, re.sub(r"in line \d+", "in line N", problem.fact), problem.fix, *problem.notes)
    for folder in folders:
        said = tuple(text.replace(f"{folder}/", "") for text in said)
    return (*(re.sub(r"\(\.\S*/support/", "(support/", text) for text in said), problem.place.path)


def underlined(place: Place) -> str:
    return place.text[place.column - 1 : place.column - 1 + place.length]


SPLITS = [(file, name) for file in FILES for name in sections(file.read_text()) if name not in ("extends", "name")]


@pytest.mark.parametrize(("file", "moved"), SPLITS, ids=[f"{file.stem}-{name}" for file, name in SPLITS])
def test_a_mistake_of_a_parent_is_shown_in_the_parent(
    file: Path, moved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    expected = load(file.name).check()
    parts = sections(file.read_text())
    below = tmp_path / "below"
    for folder in (tmp_path, below):
        shutil.copytree(FOLDER / "support", folder / "support")
    (below / "parent.yaml").write_text(f"extends: {DEFAULT}\n# a comment\n{parts[moved]}")
    rest = "".join(text for name, text in parts.items() if name not in ("extends", moved))
    (tmp_path / "child.yaml").write_text(f"extends: below/parent.yaml\n{rest}")
    monkeypatch.chdir(tmp_path)
    found = load("child.yaml").check()
    here = {words(problem, below, tmp_path): problem.place for problem in found}
    assert sorted(here) == sorted(words(problem, FOLDER) for problem in expected)
    first = file.read_text().splitlines().index(parts[moved].splitlines()[0]) + 1
    for problem in expected:
        place, old = here[words(problem, FOLDER)], problem.place
        assert (place.text, place.column, place.length) == (old.text, old.column, old.length)
        if old.file == file.name and old.text in parts[moved].splitlines():
            assert (place.file, place.line) == ("below/parent.yaml", old.line - first + 3)
        elif old.file == file.name:
            assert place.file == "child.yaml"


def flow(value: Any) -> str:
    """A value in YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    return ".nan" if isinstance(value, float) and math.isnan(value) else json.dumps(value)


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    else:
        yield ".".join(path), value


def data_of(text: str) -> Any:
    tree, problems = load_text(text, Source("", text.splitlines()))
    assert tree is not None and not problems
    return plain(tree)


SETS = [file for file in FILES if not file.stem.startswith(NOT_YAML)]


@pytest.mark.parametrize("deep", [True, False], ids=["value-by-value", "section-by-section"])
@pytest.mark.parametrize("file", SETS, ids=[file.stem for file in SETS])
def test_a_mistake_in_set_is_shown_in_set(file: Path, deep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    expected = {words(problem): problem.place for problem in load(file.name).check()}
    data = data_of(file.read_text())
    data = {name: value for name, value in data.items() if name not in ("extends", "name")}
    pairs = leaves(data) if deep else data.items()
    arguments = ["name=bad", *(f"{path}={flow(value)}" for path, value in pairs)]
    found = {words(problem): problem.place for problem in load(DEFAULT, arguments).check()}
    assert sorted(found) == sorted(expected)
    for said, place in found.items():
        if expected[said].file == file.name:
            assert place.file == "--set"
            assert (place.line, place.text in arguments) == (1, True)
            old, new = underlined(expected[said]), underlined(place)
            whole = data_of(old)
            assert new == old or data_of(new) == whole or new in whole, "the same key, the same value, or a part of it"
        elif expected[said].file.endswith("grpo_sync.yaml"):
            assert (place.line, place.column) == (expected[said].line, expected[said].column)
