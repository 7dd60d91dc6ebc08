"""Reward 1 for the expected answer, 0 for anything else."""

from __future__ import annotations

from typing import NamedTuple

from flowrl.batch import Prompt, Sample
from flowrl.node import Node


class ExactMatch(Node):
    """Score 1.0 where the response is the answer, letter for letter, and 0.0 elsewhere."""

    strip: bool = True
    """Ignore white space around response and answer."""
    ignore_case: bool = False
    """Take capital and small letters as equal."""

    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, response: Sample[str], answer: Prompt[str]) -> Out:
        expected = answer.per_sample(response)
        pairs = zip(response, expected, strict=True)
        return self.Out(Sample(response.rows, [float(self._plain(got) == self._plain(right)) for got, right in pairs]))

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
