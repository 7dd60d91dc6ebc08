"""Every shipped pipeline and example passes its check, and every library node keeps its contract."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import flowrl
from flowrl.registry import find, library_names

ROOT = Path(__file__).parents[2]
PLANNED = {"qwen_gsm8k_2node": 1}
"""What can be planned, and not yet run: the number of machines is warned of."""
FILES = sorted([*ROOT.glob("pipelines/*.yaml"), *ROOT.glob("examples/*/*.yaml")])


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_a_shipped_pipeline_has_no_problem(file: Path) -> None:
    expected = ["FR079"] * PLANNED.get(file.stem, 0)
    assert [problem.code for problem in flowrl.load(file).check()] == expected


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_the_resolved_document_resolves_to_itself(file: Path, tmp_path: Path) -> None:
    text = flowrl.load(file).resolved()
    again = tmp_path / "resolved.yaml"
    again.write_text(text)
    assert flowrl.load(again).resolved() == text
    assert [p.code for p in flowrl.load(again).check()] == [p.code for p in flowrl.load(file).check()]


@pytest.mark.parametrize("folder", sorted(path.parent for path in ROOT.glob("examples/*/*.yaml")), ids=lambda f: f.name)
def test_every_example_says_what_it_is(folder: Path) -> None:
    assert (folder / "README.md").read_text().startswith("# ")


@pytest.mark.parametrize("name", library_names())
def test_a_library_node_is_documented_and_declared(name: str) -> None:
    cls = find(name, ROOT).load()
    assert cls.__doc__
    assert cls.__doc__.strip().endswith(".")
    assert cls.input_ports or cls.weights == "syncs"
    for field in cls.model_fields.values():
        assert field.description, f"{name}: every parameter says what it is"
    if cls.weights == "syncs":
        assert list(inspect.signature(cls.receive).parameters) == ["self", "part", "version"]  # type: ignore[attr-defined]
    if cls.weights in ("updates", "syncs"):
        assert not cls.pure, "what changes weights is never run twice"


@pytest.mark.parametrize("name", library_names())
def test_a_library_node_is_one_class_in_the_file_of_its_name(name: str) -> None:
    cls = find(name, ROOT).load()
    family, stem = name.split(".")
    assert cls.__module__ == f"flowrl.nodes.{family}.{stem}"
    assert cls.__name__ == "".join(part.capitalize() for part in stem.split("_"))
