"""A regular expression as a reward."""

from __future__ import annotations

import re
from collections import deque
from itertools import islice
from typing import NamedTuple, Self

from pydantic import Field, field_validator, model_validator

from flowrl.batch import Prompt, Sample
from flowrl.model import SettingError
from flowrl.node import Node


class Regex(Node):
    """Score 1.0 where what the pattern finds in the response is the answer, or where it finds anything, else 0.0.

    A pattern that takes for ever on some response costs the score of that response: its process is killed in time.
    """

    pattern: str = Field(min_length=1)
    """Regular expression of Python, searched for anywhere; flags stand in it, such as `(?is)`. What its first group
    captures is compared with the answer, or the whole match where it has no group."""
    compare: bool = True
    """Compare with the answer; otherwise any match is worth 1.0."""
    last: bool = True
    """Of several matches take the last, or the first."""
    strip: bool = True
    """Ignore white space around what was captured and around the answer."""
    ignore_case: bool = False
    """Take capital and small letters as equal when comparing."""

    class Out(NamedTuple):
        reward: Sample[float]

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            where = f" at character {error.pos + 1}" if error.pos is not None else ""
            raise ValueError(f"it is no regular expression: {error.msg}{where}") from error
        except (RecursionError, OverflowError) as error:
            raise ValueError(f"it is no regular expression that Python can use: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _every_setting_counts(self) -> Self:
        for key in ("last", "strip", "ignore_case"):
            if not self.compare and getattr(self, key) != type(self).model_fields[key].default:
                fact = f"{key} has no effect with compare: false, where any match is worth 1"
                raise SettingError((key, "compare"), fact, f"compare: true, or leave {key} out")
        return self

    def needs(self) -> dict[str, bool]:
        return {"answer": self.compare}

    def run(self, response: Sample[str], answer: Prompt[str] | None = None) -> Out:
        pattern = re.compile(self.pattern)
        found = [self._found(pattern, text) for text in response]
        if answer is None:
            return self.Out(Sample(response.rows, [float(one is not None) for one in found]))
        pairs = zip(found, answer.per_sample(response), strict=True)
        scores = [float(one is not None and self._plain(one) == self._plain(right)) for one, right in pairs]
        return self.Out(Sample(response.rows, scores))

    def _found(self, pattern: re.Pattern[str], text: str) -> str | None:
        """What the chosen match captures, the empty text for a group that takes no part; None without a match."""
        matches = pattern.finditer(text)
        found = deque(matches, maxlen=1) if self.last else list(islice(matches, 1))
        return (found[0][min(1, pattern.groups)] or "") if found else None

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
