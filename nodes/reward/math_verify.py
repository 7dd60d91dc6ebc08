"""Mathematical answers compared by value: 1/2, 0.5 and \\frac{1}{2} are the same."""

from __future__ import annotations

import logging
import re
import threading
from decimal import Decimal
from typing import Any, NamedTuple

from pydantic import Field

from flowrl.batch import Prompt, Sample
from flowrl.node import Context, Node
from flowrl.nodes._backend.answers import scored
from flowrl.nodes._backend.final_answer import boxed, marked

SCIENTIFIC = re.compile(r"(?<![\w.])\d+(?:\.\d+)?[eE][+-]?\d{1,2}(?!\w)")
"""A number such as 1.5e-3, of which the library reads no more than 1.5."""
NO_FORMULA = re.compile(r"(?<!\\)\b[A-Za-z]{2,}|\d\s+\d|\n|\$|\\\(|\\\[")
"""A word that is no command of LaTeX, two numbers, a second line; or the marks of a formula, which need no others."""


MAX_FORMULA = 200
"""Characters of an answer that is a formula and nothing else."""


class MathVerify(Node):
    """Score 1.0 where the response ends in an answer of the same value as the expected one, else 0.0 (math-verify).

    The last `\\boxed{...}` counts, else what follows the last `####`, else the last answer in the text. An expected
    answer that is no mathematics leaves its responses without a score.
    """

    places: int = Field(6, ge=0)
    """Decimal places to which numbers are compared."""
    seconds: int = Field(5, ge=1)
    """For reading an answer, and again for comparing it; more is a failure, as is a formula that explodes."""

    class Out(NamedTuple):
        reward: Sample[float]

    def setup(self, context: Context) -> None:
        import math_verify

        logging.getLogger("math_verify").setLevel(logging.ERROR)  # what it warns of is told as a failure
        math_verify.parse("$1$", parsing_timeout=0)  # the first call builds its grammar

    def run(self, response: Sample[str], answer: Prompt[str]) -> Out:
        from math_verify.errors import TimeoutException

        texts, answers = list(response), list(answer.per_sample(response))
        found = scored(response.rows, lambda row: self._score(texts[row], answers[row]), TimeoutException)
        return self.Out(Sample(response.rows, found))  # type: ignore[arg-type]

    def _score(self, text: str, answer: str) -> float:
        from math_verify import verify

        # It measures by a signal, which only the main thread gets; elsewhere the engine's limit holds alone.
        limit = self.seconds if threading.current_thread() is threading.main_thread() else 0
        expected, given = self._parsed(answer, limit), self._parsed(text, limit)
        if not expected:
            raise ValueError(f"the expected answer {answer[-200:]!r} is no mathematics")
        settings: dict[str, Any] = {"float_rounding": self.places, "timeout_seconds": limit}
        try:
            return float(verify(expected, given, raise_on_error=True, **settings))
        except Exception:  # of one way to compare; another may fit
            return float(verify(expected, given, raise_on_error=False, **settings))

    def _parsed(self, text: str, limit: int) -> list[Any]:
        """What the last answer in a text can mean; empty where there is none."""
        from math_verify import parse

        try:
            found: list[Any] = parse(_last_answer(text), parsing_timeout=limit, raise_on_error=True)
        except Exception:  # of its many, for text that is no formula
            return []
        return found


def _last_answer(text: str) -> str:
    """The part of a text that holds its last answer, marked as a formula where it is one."""
    if (content := boxed(text)) is not None:
        return f"\\boxed{{{_plain_numbers(content)}}}"
    bare = _plain_numbers(marked(text))
    return bare if NO_FORMULA.search(bare) or len(bare) > MAX_FORMULA else f"${bare}$"


def _plain_numbers(text: str) -> str:
    return SCIENTIFIC.sub(lambda match: f"{Decimal(match[0]):f}", text)
