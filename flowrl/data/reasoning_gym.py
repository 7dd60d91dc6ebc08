"""Tasks of the package `reasoning_gym`: their problems are made when the run comes to them.

The column `entry` holds what the task's own scorer needs. `answer` is left out of tasks that have none to compare with.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, overload

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from flowrl.data.base import BAD_DATA, DataFault, DataSet, Placed, raised
from flowrl.data.rows import Row
from flowrl.errors import Problem, nearest
from flowrl.fields import FieldType

_OWN = ("size", "seed")
"""Settings of every task that are keys of the data set."""
_WRONG_SCALARS = {"int_type", "int_from_float", "float_type", "bool_type", "string_type", "literal_error"}
"""What Pydantic finds that is certainly wrong: the package's hints for lists are not always right."""


class ReasoningGym(DataSet):
    """Prompts of one task of `reasoning_gym`, with what its scorer needs."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    """Kind of data set."""
    task: str = Field(min_length=1)
    """Name of the task, such as `chain_sum`."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task's own, such as `{min_terms: 2, max_terms: 3}`."""
    size: int = Field(default=1000, ge=1)
    """Number of rows."""
    seed: int = Field(default=0, ge=0, le=2**31 - 1)
    """Which problems; another seed gives others."""

    @property
    def about(self) -> str:
        """Kind and task."""
        return f"{super().about} {self.task}"

    def field_types(self) -> dict[str, FieldType]:
        """Prompt, answer, name of the task and the whole entry; none for a task that cannot be made."""
        try:
            first = self._first
        except DataFault:
            return {}
        return {name: FieldType("Prompt", "json" if name == "entry" else "str") for name in first}

    def problems(self, place: Placed, num_needed: int = 1, lower: str = "batch.prompts") -> list[Problem]:
        """An unknown task, settings that it does not take, too few rows for a batch."""
        try:
            _ = self._first
        except DataFault as fault:
            return [fault.problem(place)]
        if self.size >= num_needed:
            return []
        fact = f"{num_needed} prompts are needed at once, but the data set has {self.size}"
        return [Problem(BAD_DATA, place("size"), fact, f"write size: {num_needed} or more, or lower {lower}")]

    def rows(self, place: Placed) -> Sequence[Row]:
        """All problems, each made when it is asked for."""
        try:
            return Made(self, self._made(), place)
        except DataFault as fault:
            raise raised(fault, place) from fault

    def fingerprint(self) -> str:
        """Of the settings and of the version of the package, from which the rows follow."""
        from importlib.metadata import version

        return self.digest(self.task, self.config, self.size, self.seed, version("reasoning_gym"))

    @cached_property
    def _first(self) -> Row:
        return self.row(self._made(), 0)

    def row(self, made: Any, position: int) -> Row:
        """A problem as a row. Raises `DataFault` where the task cannot make it."""
        from flowrl.encode import native  # numpy is not needed to read a document

        try:
            entry = native(made[position])
        except Exception as error:  # the task's own
            fact = f"task '{self.task}' cannot make row {position + 1}: {_said(error)}"
            raise DataFault("config", fact, "leave settings out for their defaults, or take another seed") from error
        answer = {} if entry["answer"] is None else {"answer": entry["answer"]}
        return {"prompt": entry["question"], **answer, "data_source": self.task, "entry": entry}

    def _made(self) -> Any:
        """The task with its settings. Raises `DataFault`."""
        try:
            from reasoning_gym.factory import DATASETS
        except ModuleNotFoundError as error:
            fact = "the package 'reasoning-gym' is not installed"
            raise DataFault("type", fact, "pip install 'flowrl[tasks]'") from error
        if self.task not in DATASETS:
            raise DataFault("task", f"reasoning_gym has no task '{self.task}'", nearest(self.task, DATASETS))
        made: Any
        made, settings = DATASETS[self.task]
        try:
            config = self._settings(settings)
            config.validate()
            return made(config=config)
        except DataFault:
            raise
        except Exception as error:  # an assertion of the task's own
            said = _said(error)
            about = [key for key in self.config if key in said][:1]
            fact = f"task '{self.task}' does not take this config: {said}"
            raise DataFault(
                ("config", *about), fact, "change what it names, or leave it out for its default"
            ) from error

    def _settings(self, kind: Any) -> Any:
        known = {field.name for field in dataclasses.fields(kind)}
        for key in self.config:
            if key in _OWN:
                fact, fix = f"'{key}' stands beside `task:`, not in `config:`", f"{key}: {self.config[key]}"
                raise DataFault(("config", key), fact, fix)
            if key not in known:
                fact, fix = f"task '{self.task}' has no setting '{key}'", nearest(key, known - {*_OWN}) or "remove it"
                raise DataFault(("config", key), fact, fix)
        values = {**self.config, "size": self.size, "seed": self.seed}
        try:
            return TypeAdapter(kind).validate_json(json.dumps(values), strict=True)
        except PydanticUserError:  # a hint that has no schema
            return kind(**values)
        except ValidationError as error:
            for one in error.errors():
                if one["type"] in _WRONG_SCALARS and len(one["loc"]) == 1:
                    key, said = str(one["loc"][0]), one["msg"][0].lower() + one["msg"][1:]
                    fix = f"write another {key}, or leave it out for its default"
                    raise DataFault(("config", key), f"task '{self.task}': {key}: {said}", fix) from error
            return kind(**values)


class Made(Sequence[Row]):
    """The problems of a task: made once, when somebody asks for them."""

    def __init__(self, data: ReasoningGym, task: Any, place: Placed) -> None:
        self._data, self._task, self._place = data, task, place
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return self._data.size

    @overload
    def __getitem__(self, position: int) -> Row: ...

    @overload
    def __getitem__(self, position: slice) -> list[Row]: ...

    def __getitem__(self, position: int | slice) -> Row | list[Row]:
        if isinstance(position, slice):
            return [self[each] for each in range(*position.indices(len(self)))]
        if not 0 <= position < len(self):
            raise IndexError(position)
        if position not in self._rows:
            try:
                row = self._data.row(self._task, position)
            except DataFault as fault:
                raise raised(fault, self._place) from fault
            self._rows[position] = row
        return self._rows[position]


def _said(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
