"""Several sources in one set: each gives its share of the prompts, in every stretch of the run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from flowrl.data.arithmetic import Arithmetic
from flowrl.data.base import BAD_DATA, DataSet, Loading, Name, Placed
from flowrl.data.hf import Hf
from flowrl.data.jsonl import Jsonl
from flowrl.data.parquet import Parquet
from flowrl.data.python import Python
from flowrl.data.reasoning_gym import ReasoningGym
from flowrl.data.rows import Loaded, Mixed, Part, Streamed
from flowrl.errors import PipelineError, Place, Problem, nearest
from flowrl.fields import Dtype, FieldType
from flowrl.model import SettingError

SourceSpec = Annotated[Arithmetic | Jsonl | Parquet | Hf | ReasoningGym | Python, Field(discriminator="type")]
"""Every kind of data set that has rows of its own."""
SOURCE_COLUMN = "data_source"
"""Names the source of each row."""
_WIDER: dict[frozenset[Dtype], Dtype] = {frozenset({"int", "float"}): "float", frozenset({"str", "json"}): "json"}
"""What holds values of both types."""


class Mixture(DataSet):
    """Rows of several sources, each with its share."""

    type: Literal["mixture"] = "mixture"
    """Kind of data set."""
    sources: dict[Name, SourceSpec] = Field(min_length=1)
    """Data sets by name, of any other type."""
    weights: dict[Name, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Shares of the prompts, relative to each other, by the name of the source; 1 where none is given."""
    columns: list[str] | None = Field(default=None, min_length=1)
    """Columns to take of each source; null takes all, which must then be the same in all sources."""

    @model_validator(mode="after")
    def _weights_are_of_sources(self) -> Self:
        for name in self.weights:
            if name not in self.sources:
                raise SettingError("weights", f"there is no source '{name}'", nearest(name, self.sources))
        return self

    @property
    def about(self) -> str:
        """Kind, and the share of each source."""
        return "mixture of " + ", ".join(f"{self.share(name):.1%} {name}" for name in self.sources)

    def share(self, name: str) -> float:
        """The part of all prompts that a source gives."""
        return self.weights.get(name, 1.0) / sum(self.weights.get(other, 1.0) for other in self.sources)

    def field_types(self) -> dict[str, FieldType]:
        """The columns of the sources, and the name of the source; none if those of one cannot be known."""
        every = [self._columns_of(name) for name in self.sources]
        if not all(every) or self._differences(lambda *_: Place("")):
            return {}
        return {name: FieldType("Prompt", _wider([types[name] for types in every]) or "json") for name in every[0]}

    def problems(self, place: Placed, num_needed: int = 1, lower: str = "batch.prompts") -> list[Problem]:
        """The problems of the sources, too few rows in one for its share, columns that differ."""
        found: list[Problem] = []
        for name, source in self.sources.items():

            def inside(*keys: str, name: str = name) -> Place:
                return place("sources", name, *keys)

            least = least_rows(self.share(name), num_needed)
            found += source.problems(inside, least, f"weights.{name} or {lower}" if len(self.sources) > 1 else lower)
        return found or self._differences(place)

    def rows(self, place: Placed) -> Loaded:
        """The rows of all sources."""
        return self.load(Loading(place=place))

    def load(self, loading: Loading | None = None) -> Mixed:
        """The rows of all sources that are short enough, and what each gives."""
        loading = loading or Loading()
        if problems := self._differences(loading.place):
            raise PipelineError(problems)
        parts, told = [], []
        for name, source in self.sources.items():
            limits = {"max_prompt_tokens": self.max_prompt_tokens, "overlong": self.overlong}
            limited = source if source.max_prompt_tokens else source.model_copy(update=limits)
            rows = limited.load(loading.below("sources", name))
            assert not isinstance(rows, Mixed), "a source is no mixture"
            weight, shuffle = self.weights.get(name, 1.0), self.shuffle and source.shuffle
            parts.append(Part(rows, weight, shuffle, name, {SOURCE_COLUMN: name}))
            size = "rows as they are read" if isinstance(rows, Streamed) else f"{len(rows)} rows"
            told.append(f"{name} {self.share(name):.1%} of the prompts ({size})")
        loading.note(f"{loading.name}: {', '.join(told)}")
        return Mixed(tuple(parts))

    def fingerprint(self) -> str:
        """Of the sources in their order, and of their weights."""
        prints = [(name, self.weights.get(name, 1.0), source.fingerprint()) for name, source in self.sources.items()]
        return self.digest(self.columns, *prints)

    def _columns_of(self, name: str) -> dict[str, Dtype]:
        """The columns that are taken of a source, with the one that names it; none if they cannot be known."""
        types = {column: type_.dtype for column, type_ in self.sources[name].field_types().items()}
        if not types:
            return {}
        types.setdefault(SOURCE_COLUMN, "str")
        return {column: dtype for column, dtype in types.items() if self.columns is None or column in self.columns}

    def _differences(self, place: Placed) -> list[Problem]:
        """Columns that one source has and another lacks, or has as another type."""
        first, *others = self.sources
        mine, found = self._columns_of(first), []
        for other in others:
            theirs = self._columns_of(other)
            if not (mine and theirs):
                continue  # reported already
            both = [column for column in mine if column in theirs]
            alike = [column for column in both if _wider([mine[column], theirs[column]])]
            fix = f"columns: [{', '.join(alike)}], or rename: {{NEW: OLD}} in one of the sources"
            for column in dict.fromkeys([*mine, *theirs]):
                if column not in alike:
                    kinds = [f"'{name}' has {_said(column, types)}" for name, types in ((first, mine), (other, theirs))]
                    found.append(
                        Problem(BAD_DATA, place("sources", other, "type"), f"sources differ: {', '.join(kinds)}", fix)
                    )
        return found + self._strangers(place)

    def _strangers(self, place: Placed) -> list[Problem]:
        """Columns that are to be taken and that no source has."""
        every = [self._columns_of(name) for name in self.sources]
        lost = [column for column in self.columns or () if all(every) and not any(column in types for types in every)]
        there = {column for source in self.sources.values() for column in source.field_types()}
        return [
            Problem(BAD_DATA, place("columns"), f"no source has a column '{column}'", nearest(column, there))
            for column in lost
        ]


def least_rows(share: float, num_prompts: int) -> int:
    """Rows that a source needs so that it can give its share of so many prompts without giving one twice."""
    return max(1, math.ceil(share * num_prompts - 1e-9))


def _said(column: str, types: Mapping[str, Dtype]) -> str:
    return f"'{column}' as {types[column]}" if column in types else f"no '{column}'"


def _wider(types: Sequence[Dtype]) -> Dtype | None:
    """The type that holds values of all these; None where there is none."""
    kinds = frozenset(types)
    return types[0] if len(kinds) == 1 else _WIDER.get(kinds)
