"""Mathematical answers compared by value: 1/2, 0.5 and \\frac{1}{2} are the same."""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

from pydantic import Field

from flowrl.batch import Prompt, Sample
from flowrl.node import Context, Node
from flowrl.nodes._backend.answers import scored
from flowrl.nodes._backend.formulas import Answer, as_formula, as_text, base_of, last_answer, plain


class MathVerify(Node):
    """Score 1.0 where the response ends in an answer of the same value as the expected one, else 0.0 (math-verify).

    The last `\\boxed{...}` counts, else what follows the last `####`, else the last answer in the text. Words are
    compared as words. An expected answer that cannot be read leaves its responses without a score.
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
        expected, given = last_answer(answer), last_answer(text)
        meanings = _parsed(expected, limit)
        if not meanings and as_formula(expected.content):
            meanings = _parsed(as_text(expected), limit)
        if not meanings and not plain(expected):
            raise ValueError(f"the expected answer {answer[-200:]!r} is no mathematics")
        if plain(expected) and plain(expected) == plain(given):
            return 1.0
        if base_of(expected) and base_of(given) not in ("", base_of(expected)):
            return 0.0
        settings: dict[str, Any] = {"float_rounding": self.places, "timeout_seconds": limit}
        found = _parsed(given, limit) or _parsed(as_text(given), limit)
        try:
            return float(verify(meanings, found, raise_on_error=True, **settings))
        except Exception:  # of one way to compare; another may fit
            return float(verify(meanings, found, raise_on_error=False, **settings))


def _parsed(answer: Answer, limit: int) -> list[Any]:
    """What an answer can mean as mathematics; empty where it is none."""
    from math_verify import LatexExtractionConfig, parse
    from math_verify.errors import TimeoutException

    formula = LatexExtractionConfig(boxed_match_priority=0)
    text, ways = (
        (f"\\boxed{{{as_formula(answer.content)}}}", [[formula]]) if answer.is_formula else (answer.content, [])
    )
    try:
        found: list[Any] = parse(text, *ways, parsing_timeout=limit, raise_on_error=True)
    except TimeoutException:  # whose message is the whole text
        raise TimeoutException(f"reading {text[-60:]!r} took more than {limit} s") from None
    except Exception:  # of its many, for text that is no formula
        return []
    return [one for one in found if not isinstance(one, str)]
