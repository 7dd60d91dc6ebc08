"""Columns of trajectory data as typed arrays: `Step`, `Prompt`, `Sample`, `PromptToken`, `Token`, and `Batch`.

Every column carries its `Rows`. Jagged is the only layout that nodes see: no padding value can reach a mean. A missing
value of a `Sample[float]` or `Prompt[float]` reads as NaN, and NaN writes null. Statistics are in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from flowrl.column import NUMPY_DTYPES, Column, Numeric, T, as_array
from flowrl.fields import Axis, Dtype, FieldType
from flowrl.rows import Array, Ints, Jagged, Rows

Json: TypeAlias = Any
"""Element type of a JSON field: write `Sample[Json]`."""


class Step(Column[T]):
    """One value for the whole step."""

    axis = "Step"
    __slots__ = ()

    def __init__(self, rows: Rows, value: T) -> None:
        super().__init__(rows, as_array([value]))

    def _expected(self) -> int:
        return 1

    def _with(self, values: Array) -> Self:
        return type(self)(self.rows, values[0])

    @property
    def value(self) -> T:
        """The value."""
        return cast(T, self.values.tolist()[0])


class Prompt(Numeric[T]):
    """One value per prompt, i.e. group: shape (G,), in the order of `rows.uids`."""

    axis = "Prompt"
    __slots__ = ()

    def _expected(self) -> int:
        return self.rows.num_groups

    def _with(self, values: Array) -> Self:
        return type(self)(self.rows, values)

    def per_sample(self, like: Column[Any]) -> Sample[T]:
        """The group's value for each trajectory of `like`, by uid: shape (N,)."""
        if like.rows is self.rows or like.rows.uids == self.rows.uids:
            return Sample(like.rows, self.values[like.rows.group])
        position = {uid: index for index, uid in enumerate(self.rows.uids)}
        missing = [uid for uid in like.rows.uids if uid not in position]
        if missing:
            raise ValueError(f"no value for group {missing[0]}: the two columns hold different prompts")
        groups = np.array([position[uid] for uid in like.rows.uids], dtype=np.int64)
        return Sample(like.rows, self.values[groups[like.rows.group]])


class Sample(Numeric[T]):
    """One value per trajectory: shape (N,)."""

    axis = "Sample"
    __slots__ = ()

    def _with(self, values: Array) -> Self:
        return type(self)(self.rows, values)

    def per_token(self, like: Token[Any]) -> Token[T]:
        """The trajectory's value for each of its response tokens."""
        if like.rows != self.rows:
            raise ValueError("the two columns have different rows: join them by identity first")
        return Token(self.rows, np.repeat(self.values, like.lengths), like.offsets)

    def sum(self, axis: Literal["prompt"] = "prompt") -> Prompt[T]:
        """Sum over the group's trajectories."""
        assert axis == "prompt", "a Sample is summed over its prompt group"
        return Prompt(self.rows, np.bincount(self.rows.group, self.values, self.rows.num_groups))

    def mean(self, axis: Literal["prompt"] = "prompt") -> Prompt[float]:
        """Mean over the group's trajectories, those without a value left out; NaN where none has one."""
        assert axis == "prompt", "a Sample is averaged over its prompt group"
        valid = ~np.isnan(self.values.astype(np.float64))
        group, num_groups = self.rows.group[valid], self.rows.num_groups
        count = np.bincount(group, minlength=num_groups).astype(np.float64)
        total = np.bincount(group, self.values[valid], num_groups)
        return Prompt(self.rows, np.divide(total, count, out=np.full(num_groups, np.nan), where=count > 0))


class Token(Numeric[T]):
    """One value per response token, model tokens and tool observations alike: N rows of unequal length."""

    axis = "Token"
    __slots__ = ("offsets",)

    def __init__(self, rows: Rows, values: Iterable[T] | Array, offsets: Ints) -> None:
        self.offsets = offsets
        super().__init__(rows, values)

    @classmethod
    def of(cls, rows: Rows, values: Sequence[Any], dtype: Dtype | None = None) -> Self:
        """From one list or array per trajectory."""
        jagged = Jagged.of([as_array(row, dtype) for row in values], None if dtype is None else NUMPY_DTYPES[dtype])
        return cls(rows, jagged.values, jagged.offsets)

    def _check(self) -> None:
        if len(self.offsets) != len(self.rows) + 1 or len(self.values) != self.offsets[-1]:
            raise ValueError(
                f"Token needs {len(self.rows) + 1} offsets that end at the number of values, got "
                f"{len(self.offsets)} offsets that end at {self.offsets[-1]} for {len(self.values)} values"
            )

    def _with(self, values: Array) -> Self:
        return type(self)(self.rows, values, self.offsets)

    def _operand(self, other: Any) -> Any:
        values = super()._operand(other)
        if isinstance(other, Token) and not np.array_equal(other.offsets, self.offsets):
            raise ValueError("the two columns have rows of different length")
        return values

    @property
    def jagged(self) -> Jagged:
        """Values and offsets."""
        return Jagged(self.values, self.offsets)

    @property
    def lengths(self) -> Ints:
        """Response tokens of each trajectory: shape (N,)."""
        return self.jagged.lengths

    def sum(self, axis: Literal["sample"] = "sample") -> Sample[T]:
        """Sum over each trajectory's tokens (of a mask: how many are True); 0 for an empty one."""
        assert axis == "sample", "a Token is summed over its trajectory"
        total = np.bincount(self.jagged.row, self.values, len(self.rows))
        return Sample(self.rows, total if self.values.dtype.kind == "f" else total.astype(np.int64))

    def mean(self, axis: Literal["sample"] = "sample") -> Sample[float]:
        """Mean over each trajectory's tokens; NaN for an empty one."""
        assert axis == "sample", "a Token is averaged over its trajectory"
        total = np.bincount(self.jagged.row, self.values, len(self.rows))
        count = self.lengths
        return Sample(self.rows, np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0))

    def padded(self, fill: float = 0) -> NDArray[Any]:
        """(N, longest) array, filled at the end of shorter rows: for kernels that need a rectangle."""
        return self.jagged.padded(fill)


class PromptToken(Column[T]):
    """One value per prompt token. Distinct prompts are stored once; `index[i]` is the prompt of trajectory i."""

    axis = "PromptToken"
    __slots__ = ("index", "offsets")

    def __init__(self, rows: Rows, values: Iterable[T] | Array, offsets: Ints, index: Ints) -> None:
        self.offsets, self.index = offsets, index
        super().__init__(rows, values)

    @classmethod
    def of(cls, rows: Rows, distinct: Sequence[Any], index: Sequence[int] | Array | None = None) -> Self:
        """From one list per distinct prompt; by default prompt g belongs to group g."""
        jagged = Jagged.of(distinct, np.int64)
        where = rows.group if index is None else np.asarray(index)
        return cls(rows, jagged.values, jagged.offsets, where.astype(np.int32))

    def _check(self) -> None:
        if len(self.index) != len(self.rows):
            raise ValueError(f"PromptToken needs one prompt index for each of {len(self.rows)} trajectories")

    def _with(self, values: Array) -> Self:
        return type(self)(self.rows, values, self.offsets, self.index)

    @property
    def distinct(self) -> Jagged:
        """The distinct prompts."""
        return Jagged(self.values, self.offsets)

    @property
    def lengths(self) -> Ints:
        """Prompt tokens of each trajectory: shape (N,)."""
        return self.distinct.lengths[self.index]

    @property
    def jagged(self) -> Jagged:
        """The prompt of every trajectory, repeated where shared."""
        return self.distinct.take(self.index)


COLUMN_CLASSES: dict[Axis, type[Column[Any]]] = {
    "Step": Step, "Prompt": Prompt, "Sample": Sample, "PromptToken": PromptToken, "Token": Token,
}  # fmt: skip


@dataclass(frozen=True)
class Batch:
    """Columns of the same rows: what a node reads or writes, and what travels through the object store."""

    rows: Rows
    columns: Mapping[str, Column[Any]]
    types: Mapping[str, FieldType]

    def __reduce__(self) -> tuple[Any, ...]:
        from flowrl.wire import from_arrow, to_arrow

        return from_arrow, (to_arrow(self),)
