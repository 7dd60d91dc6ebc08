"""Reading text as a file: what every test of the spec does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from flowrl.errors import Problem
from flowrl.spec.read import Reading, read_document

GOOD = """\
flowrl: 1
name: small
params: {base: arith-tiny}
models:
  policy: {path: $base, trainable: true, optimizer: {lr: 1e-6}}
data:
  train: {type: arithmetic, size: 64}
batch: {prompts: 4, group: 2}
pools:
  train: {workers: 1}
  generate: {shares: train}
nodes:
  rollout: {use: rollout.generate, model: policy, pool: generate, temperature: 1.0}
  reward: {use: reward.exact_match}
schedule: {mode: sync}
run: {steps: 3}
"""


@dataclass(frozen=True)
class Reader:
    """Calls `read_document` on text."""

    folder: Path
    good: str = GOOD
    """A right document."""

    def __call__(self, text: str, *sets: str) -> Reading:
        path = self.folder / "p.yaml"
        path.write_text(text, encoding="utf-8")
        return read_document(path, sets)

    def file(self, name: str, text: str, *sets: str) -> Reading:
        """The text under another name, read at once."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return read_document(path, sets)

    def changed(self, before: str, after: str, *sets: str) -> Reading:
        """The right document with one place changed."""
        assert GOOD.count(before) == 1
        return self(GOOD.replace(before, after), *sets)

    def problem(self, before: str, after: str, *sets: str) -> Problem:
        """The only problem of the document changed so."""
        reading = self.changed(before, after, *sets)
        assert len(reading.problems) == 1, [problem.render() for problem in reading.problems]
        return reading.problems[0]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    """A reader of text."""
    return Reader(tmp_path)
