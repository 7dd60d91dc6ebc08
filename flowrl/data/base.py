"""What every data set offers: fields known before it is loaded, cheap checks, rows, a fingerprint.

A new kind is a subclass with a `type` of its own, named in `flowrl.data.mixture.SourceSpec`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from flowrl.data.rows import Loaded, Row, Streamed
from flowrl.errors import PipelineError, Place, Problem
from flowrl.fields import FieldType
from flowrl.model import SettingError, Settings

__all__ = ["BAD_DATA", "DataFault", "DataSet", "Loading", "Placed", "Row"]

BAD_DATA = "FR018"
"""Code of the problems of data."""

NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*$"
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN, max_length=80)]
"""Name of a model, data set, pool or node: no dots, for `--set` and metric names use those."""
Text = Annotated[str, StringConstraints(min_length=1)]
"""Text of at least a character, such as the name of a column."""

Placed = Callable[..., Place]
"""Says where a key of a data set, or a key below it, was written."""
Lengths = Callable[[Sequence[Row]], Sequence[int] | None]
"""Tokens of the prompt of each row, after templating; None where nobody can tell."""


class DataFault(Exception):
    """Why a data set cannot be read: the key to change, the fact and the fix."""

    def __init__(self, keys: str | tuple[str, ...], fact: str, fix: str) -> None:
        super().__init__(keys, fact, fix)  # with which it is made again in another process
        self.keys, self.fact, self.fix = (keys,) if isinstance(keys, str) else keys, fact, fix

    def __str__(self) -> str:
        return self.fact

    def problem(self, place: Placed) -> Problem:
        """The same for the user, at the key."""
        return Problem(BAD_DATA, place(*self.keys), self.fact, self.fix)


def _nowhere(*keys: str) -> Place:
    return Place("<data>", path=".".join(keys))


def _untold(rows: Sequence[Row]) -> None:
    pass


def _unheard(text: str) -> None:
    pass


@dataclass(frozen=True)
class Loading:
    """What a run gives a data set that it loads."""

    name: str = "data"
    """What to call the set."""
    place: Placed = _nowhere
    lengths: Lengths = _untold
    """Counts the tokens of prompts."""
    note: Callable[[str], None] = _unheard
    """Takes what a person should read."""
    prompts: tuple[str, ...] = ()
    """Columns that a rollout reads as prompts."""

    def below(self, *keys: str) -> Loading:
        """The same for a set inside this one."""
        return replace(self, name=".".join([self.name, *keys]), place=lambda *more: self.place(*keys, *more))


class DataSet(Settings, ABC):
    """Rows of prompts."""

    shuffle: bool = True
    """Take the rows in another order each epoch, derived from the seed of the run."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt, in tokens as the rollout's model reads it: after its chat template. Null sets no limit."""
    overlong: Literal["drop", "error"] = "drop"
    """What becomes of a longer prompt: it is left out, or the run is refused."""

    @model_validator(mode="after")
    def _overlong_prompts_are_counted(self) -> Self:
        if self.overlong == "error" and self.max_prompt_tokens is None:
            fact = "`overlong` has no effect without a limit on prompts"
            raise SettingError(("overlong", "max_prompt_tokens"), fact, "max_prompt_tokens: 512, or remove `overlong:`")
        return self

    @property
    def about(self) -> str:
        """What it is, in a few words."""
        return str(getattr(self, "type", type(self).__name__))

    @abstractmethod
    def field_types(self) -> dict[str, FieldType]:
        """The fields that the rows give, all on the axis `Prompt`; none if that cannot be known."""

    @abstractmethod
    def problems(self, place: Placed, num_needed: int = 1, lower: str = "batch.prompts") -> list[Problem]:
        """What can be found wrong without reading everything; `place` says where a key of the set stands.

        `num_needed` is the least number of rows: a batch must not hold the same row twice. `lower` names the settings
        that it follows from.
        """

    @abstractmethod
    def rows(self, place: Placed) -> Loaded:
        """All rows, whatever their length. Raises `PipelineError` with every bad one."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the rows change: a resumed run must not apply an old position to other data."""

    def load(self, loading: Loading | None = None) -> Loaded:
        """The rows that a run takes: all whose prompt is short enough. Raises `PipelineError`."""
        from flowrl.data.limit import Limit  # which know this class
        from flowrl.data.prompts import checked

        loading = loading or Loading()
        rows = self.rows(loading.place)
        assert isinstance(rows, (Sequence, Streamed)), "a mixture loads its own sources"
        rows = checked(rows, loading)
        if self.max_prompt_tokens is None:
            return rows
        return Limit(self.max_prompt_tokens, self.overlong, loading).applied(rows)

    def digest(self, *parts: object) -> str:
        """A fingerprint of these values and of the limit on prompts."""
        from flowrl.encode import dumps  # numpy is not needed to read a document

        limit = self.max_prompt_tokens if self.overlong == "drop" else None
        return hashlib.sha256(dumps([type(self).__name__, *parts, limit]).encode()).hexdigest()[:16]


def raised(fault: DataFault, place: Placed) -> PipelineError:
    """A fault as the error of a load."""
    return PipelineError([fault.problem(place)])
