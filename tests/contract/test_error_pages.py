"""docs/errors.md: each YAML example, laid over the default pipeline, gives the code of its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flowrl

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
SECTIONS = re.findall(r"^## (FR\d{3}): .*?(?=^## FR|\Z)", PAGE.read_text(), re.M | re.S)
EXAMPLES = {
    match[1]: match[2]
    for match in re.finditer(r"^## (FR\d{3}): [^\n]*\n(?:(?!^## ).)*?```yaml\n(.*?)```", PAGE.read_text(), re.M | re.S)
}
NODES = """
from flowrl.nodes.rollout.generate import Generate

class Nucleus(Generate):
    top_p: float = 1.0
"""
OF_THE_TEXT = {"FR002", "FR003"}
"""Their examples are no YAML, so they stand alone."""


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 30


@pytest.mark.parametrize("code", sorted(EXAMPLES))
def test_the_example_of_a_page_gives_its_code(code: str, tmp_path: Path) -> None:
    example = EXAMPLES[code]
    extends = "" if "extends:" in example else "extends: grpo_sync\n"
    named = "" if example.startswith("name:") else "name: example\n"
    (tmp_path / "my_nodes.py").write_text(NODES)
    path = tmp_path / "example.yaml"
    path.write_text(("" if code in OF_THE_TEXT else extends + named) + example)
    found = {problem.code for problem in flowrl.load(path).check()}
    assert code in found
    assert not {other for other in found if other < code and other not in ("FR030", "FR079")}, "the first is the cause"
