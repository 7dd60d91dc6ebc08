"""What judges that are language models share: what they are asked, and how a score is read out of their reply."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from flowrl.batch import Json, Prompt, Sample
from flowrl.errors import nearest
from flowrl.model import SettingError
from flowrl.node import Node
from flowrl.nodes._backend.answers import BadAnswer, score_of

TEMPLATE = """Rate the answer to the question below from 0 (useless or wrong) to 10 (perfect).

Question: {prompt}

Answer: {response}

Reply with one line: Score: NUMBER"""
PLACE = re.compile(r"(\{\{|\}\})|\{(\w+)\}")
"""A brace that is meant as one, or a place for a field."""
FIELDS = ("prompt", "response", "answer")
SCALE = (0.0, 10.0)
"""What `TEMPLATE` asks for."""
_AMOUNT = r"[-+−]?\.?\d(?:[.,]?\d)*(?:_*[^\W_][\w.+-]*|[ \t]*%)?"
"""A number and all that belongs to it, which may show that it is none: 1e999, 7,5, 7th, 70%."""
_VERDICT = rf"{_AMOUNT}(?:[ \t]*(?:/|(?:out )?of|to|or|[-–—…]|\.\.+)[ \t]*{_AMOUNT})?"
"""That, or two of them: 7/10, or 0 to 10, which is no verdict."""
NUMBERS = re.compile(
    rf"(?i)(?<![a-z])(?:score|rating)(?:[ \t]*\([^)\n]{{0,60}}\))?[\W_]*?({_VERDICT})|\A[\W_]*?({_VERDICT})[\W_]*\Z"
)
"""The number after `Score:`, or a reply that is nothing but a number."""
PLAIN = re.compile(r"(?i)([-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)(?:\s*(?:/|(?:out )?of)\s*(\d+(?:\.\d+)?))?")
"""A number, perhaps with the highest possible one."""


class Judging(Node):
    """Base of the judges: their common settings."""

    template: str = TEMPLATE
    """What the judge is asked: {prompt}, {response} and {answer} are filled in; {{ and }} are plain braces."""
    parse: str | None = None
    """Regular expression whose one group is the verdict; its last match in the reply counts. Left out: the
    number after `Score:` or `Rating:`, a reply that is a number and nothing else, or one of the `choices`."""
    choices: dict[str, float] | None = Field(None, min_length=1)
    """Scores of verdicts that are words, such as `{yes: 1, no: 0}`; capitals do not matter."""
    # The default is none of the values: null in YAML means left out, and so can say nothing else.
    scale: Annotated[tuple[float, float], Field(strict=False)] | Literal["none"] | None = None
    """Lowest and highest number that the judge may give, which become 0 and 1; [0, 10] when left out. `none` takes the
    number as it is."""
    max_tokens: int = Field(256, ge=1)
    """Longest reply."""
    temperature: float = Field(0.0, ge=0)
    """Of the judge's sampling; 0 takes the likeliest token."""

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        names = [name for _, name in PLACE.findall(self.template) if name]
        for name in names:
            if name not in FIELDS:
                fix = f"{nearest(name, FIELDS)}; for plain braces write {{{{{name}}}}}"
                raise SettingError("template", f"the template names {{{name}}}, which is no field of it", fix)
        if "response" not in names:
            raise SettingError("template", "the template does not show the {response} that is to be judged")
        if self.parse is not None:
            try:
                num_groups = re.compile(self.parse).groups
            except re.error as error:
                where = f" at character {error.pos + 1}" if error.pos is not None else ""
                raise SettingError("parse", f"parse is no regular expression: {error.msg}{where}") from error
            if num_groups != 1:
                raise SettingError(
                    "parse", f"parse has {num_groups} groups", "put the verdict in one (...), others in (?:...)"
                )
        if self.choices is not None and self.scale is not None:
            raise SettingError(("choices", "scale"), "choices are scores already: a scale does not apply to them")
        low, high = self._bounds or SCALE
        if low >= high:
            raise SettingError("scale", f"the scale ends at {high:g}, not above its start", "scale: [0, 10]")
        return self

    @property
    def _bounds(self) -> tuple[float, float] | None:
        """Lowest and highest number; None where any will do."""
        return None if self.scale == "none" else self.scale or SCALE

    def needs(self) -> dict[str, bool]:
        names = {name for _, name in PLACE.findall(self.template)}
        return {"prompt": "prompt" in names, "answer": "answer" in names}

    def asked(self, response: Sample[str], prompt: Prompt[Json] | None, answer: Prompt[Json] | None) -> list[str]:
        """What the judge is asked about each sample; prompt and answer are None where the template has no place."""
        columns = {"prompt": prompt, "answer": answer}
        values = {name: list(column.per_sample(response)) for name, column in columns.items() if column is not None}
        return self.questions(response=list(response), **values)

    def questions(self, **columns: Sequence[Any]) -> list[str]:
        """What the judge is asked about each row; `columns` hold a value for each."""
        given = {name: [shown(value) for value in values] for name, values in columns.items()}

        def filled(row: int) -> str:
            return PLACE.sub(lambda match: given[match[2]][row] if match[2] else match[1][0], self.template)

        return [filled(row) for row in range(len(given["response"]))]

    def score(self, reply: str) -> float:
        """The score in a reply. Raises `BadAnswer` where there is none: that is a failure, and no score."""
        matches = list(self._pattern().finditer(reply))
        verdict = (matches[-1][matches[-1].lastindex or 1] or "").strip() if matches else ""
        if not verdict:
            raise BadAnswer(f"the judge's reply holds no verdict: {_end_of(reply)}")
        if self.choices is None:
            return self._scaled(verdict)
        scores = {word.casefold(): score for word, score in self.choices.items()}
        if verdict.casefold() not in scores:
            raise BadAnswer(f"the judge's verdict {verdict!r} is none of {', '.join(self.choices)}")
        return scores[verdict.casefold()]

    def _scaled(self, verdict: str) -> float:
        """The score that a number means. Raises `BadAnswer` for anything else, and for one beyond the scale."""
        plain = PLAIN.fullmatch(verdict)
        number = float(plain[1]) if plain else math.inf
        if plain is None or not math.isfinite(number):
            raise BadAnswer(f"the judge's verdict {_end_of(verdict)} is no number")
        if self._bounds is None and plain[2] is None:
            return score_of(number)
        low, high = self._bounds or (math.nan, math.nan)
        if plain[2] is not None and float(plain[2]) != high:
            raise BadAnswer(f"the judge's verdict {verdict!r} is not on the scale that was set")
        if not low <= number <= high:
            raise BadAnswer(f"the judge's verdict {number:g} is not between {low:g} and {high:g}")
        return (number - low) / (high - low)

    def _pattern(self) -> re.Pattern[str]:
        if self.parse is not None:
            return re.compile(self.parse)
        if self.choices is None:
            return NUMBERS
        words = "|".join(map(re.escape, sorted(self.choices, key=len, reverse=True)))
        return re.compile(rf"(?i)(?<!\w)({words})(?!\w)")


def shown(value: Any) -> str:
    """A field as a judge reads it: of messages what they say, with the role of each where there are several."""
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) and "content" in turn for turn in value):
        if len(value) == 1:
            return str(value[0]["content"])
        return "\n\n".join(f"{turn.get('role', 'user')}: {turn['content']}" for turn in value)
    return value if isinstance(value, str) else str(value)


def _end_of(reply: str) -> str:
    return repr(reply if len(reply) <= 120 else "…" + reply[-120:])
