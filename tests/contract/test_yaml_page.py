"""docs/yaml.md names every key that the engine reads; of data and nodes, what all of them have."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from flowrl.model import ModelSpec
from flowrl.spec import document
from flowrl.spec.document import Document, NodeSpec, PoolSpec

PAGE = (Path(__file__).parents[2] / "docs" / "yaml.md").read_text(encoding="utf-8")
ROWS = {line.split("`")[1].split(".")[0].split(":")[0]: line for line in PAGE.splitlines() if line.startswith("| `")}
SECTIONS: dict[str, list[type[BaseModel]]] = {
    "models": [ModelSpec],
    "batch": [document.BatchSpec],
    "pools": [PoolSpec],
    "nodes": [NodeSpec],
    "schedule": [document.ColocateAsyncSchedule, document.SeparateAsyncSchedule],
    "run": [document.RunSpec],
    "checkpoint": [document.CheckpointSpec],
}


def test_every_section_has_a_row() -> None:
    assert set(Document.model_fields) <= {*ROWS, "name"}


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_section_is_named(section: str) -> None:
    keys = {key for spec in SECTIONS[section] for key in spec.model_fields}
    assert not keys - set(re.findall(r"\w+", ROWS[section]))
