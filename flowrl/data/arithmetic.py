"""Sums of two numbers below a limit: the task of the default pipeline, endless and exactly scorable."""

from __future__ import annotations

import random
from typing import Literal, Self

from pydantic import Field, model_validator

from flowrl.data.base import BAD_DATA, DataSet, Placed
from flowrl.data.rows import Row
from flowrl.errors import Problem
from flowrl.fields import FieldType
from flowrl.model import SettingError


class Arithmetic(DataSet):
    """Prompts `a+b=` with the answer in digits."""

    type: Literal["arithmetic"] = "arithmetic"
    """Kind of data set."""
    size: int = Field(default=4096, ge=1)
    """Number of rows."""
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    """Which sums; another seed gives another sample."""
    low: int = Field(default=0, ge=0)
    """Smallest summand."""
    high: int = Field(default=50, ge=1)
    """Summands stay below this."""

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> Self:
        if self.low >= self.high:
            raise SettingError(
                ("low", "high"), f"low ({self.low}) must be below high ({self.high})", f"high: {self.low + 50}"
            )
        return self

    def field_types(self) -> dict[str, FieldType]:
        """Prompt, answer and the name of the source."""
        return {name: FieldType("Prompt", "str") for name in ("prompt", "answer", "data_source")}

    def problems(self, place: Placed, num_needed: int = 1, lower: str = "batch.prompts") -> list[Problem]:
        """Too few rows for a batch."""
        if self.size >= num_needed:
            return []
        fact = f"{num_needed} prompts are needed at once, but the data set has {self.size}"
        return [Problem(BAD_DATA, place("size"), fact, f"write size: {num_needed} or more, or lower {lower}")]

    def rows(self, place: Placed) -> list[Row]:
        """All sums, the same for the same settings on every machine."""
        draw = random.Random(self.seed)
        span = self.high - self.low
        # Tuples are evaluated left to right: a is drawn before b.
        pairs = [(self.low + draw.randrange(span), self.low + draw.randrange(span)) for _ in range(self.size)]
        return [{"prompt": f"{a}+{b}=", "answer": str(a + b), "data_source": "arithmetic"} for a, b in pairs]

    def fingerprint(self) -> str:
        """Of the settings, from which the rows follow."""
        return self.digest(self.size, self.seed, self.low, self.high)
