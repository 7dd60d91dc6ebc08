"""What all columns share: values of one field with the identity of their rows, and element-wise arithmetic."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

import numpy as np

from flowrl.encode import native
from flowrl.fields import Axis, Dtype
from flowrl.rows import Array, Rows

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
NUMPY_DTYPES: dict[Dtype, Any] = {"int": np.int64, "float": np.float32, "bool": np.bool_, "str": object, "json": object}


def as_array(values: Iterable[Any] | Array, dtype: Dtype | None = None) -> Array:
    """The values as a flat numpy array of the field's dtype; None becomes NaN in a float column.

    Raises `TypeError` or `ValueError` for a value that the dtype cannot hold: nothing is rounded, parsed or guessed.
    """
    if dtype == "str":
        return _texts(objects(values))
    if dtype == "json":
        items = values.tolist() if isinstance(values, np.ndarray) else values
        return objects([native(item) for item in items])
    if not isinstance(values, np.ndarray) or (dtype is not None and values.dtype == object):
        items = list(values)
        if dtype is None and not all(item is None or isinstance(item, _NUMBERS) for item in items):
            return objects(items)
        values = np.asarray([np.nan if item is None else item for item in items])
    return values if dtype is None else _cast(values, dtype)


_NUMBERS = (bool, int, float, np.number, np.bool_)


def objects(values: Iterable[Any] | Array) -> Array:
    """The values as they are, lists among them too, in a flat array."""
    items = values.tolist() if isinstance(values, np.ndarray) else list(values)
    out = np.empty(len(items), dtype=object)
    for index, item in enumerate(items):  # not `out[:] = items`, which spreads lists of equal length
        out[index] = item
    return out


def _texts(values: Array) -> Array:
    for item in values:
        if not isinstance(item, str):
            missing = item is None or (isinstance(item, float) and math.isnan(item))
            raise TypeError(f"str cannot hold {'null' if missing else repr(item)}")
    return values


def _cast(values: Array, dtype: Dtype) -> Array:
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{dtype} cannot hold {values.tolist()[0]!r}")
    with np.errstate(invalid="ignore"):  # NaN is no int; what it became is refused below
        cast = values.astype(NUMPY_DTYPES[dtype], copy=False)
    if dtype != "float" and cast.dtype.kind != values.dtype.kind and not np.array_equal(cast, values):
        raise ValueError(f"{dtype} cannot hold {values[cast != values][0].item()!r}")
    return cast


class Column(Generic[T]):
    """Values of one field together with the identity of their rows; immutable."""

    axis: ClassVar[Axis]
    __slots__ = ("rows", "values")

    def __init__(self, rows: Rows, values: Iterable[T] | Array) -> None:
        self.rows = rows
        self.values: Array = as_array(values)
        if self.values.ndim != 1:
            raise ValueError(f"{type(self).__name__} needs a flat array, got one of shape {self.values.shape}")
        self._check()

    def _check(self) -> None:
        expected = self._expected()
        if expected is not None and len(self.values) != expected:
            raise ValueError(f"{type(self).__name__} needs {expected} values, got {len(self.values)}")

    def _expected(self) -> int | None:
        return len(self.rows)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[T]:
        return iter(self.values.tolist())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.rows!r}, {self.values!r})"

    def cast(self, dtype: Dtype) -> Self:
        """The same column in the array type that the field stores."""
        return self._with(as_array(self.values, dtype))

    def _with(self, values: Array) -> Self:
        raise AssertionError("every column class says how to rebuild itself")

    def torch(self) -> torch.Tensor:
        """The flat values as a tensor that shares their memory; do not write to it."""
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # read-only memory of the object store is what we want
            return torch.from_numpy(self.values)


class Numeric(Column[T]):
    """Element-wise arithmetic and comparison between columns of the same rows, or with a number."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def _operand(self, other: Any) -> Any:
        if not isinstance(other, Column):
            return other
        if type(other) is not type(self):
            raise TypeError(
                f"{type(self).__name__} and {type(other).__name__} lie on different axes: "
                "use .per_token(...) or .per_sample(...) first"
            )
        if other.rows != self.rows or len(other.values) != len(self.values):
            raise ValueError("the two columns have different rows: join them by identity first")
        return other.values

    def _apply(self, function: Any, other: Any, swap: bool = False) -> Any:
        right = self._operand(other)
        return self._with(function(right, self.values) if swap else function(self.values, right))

    def __add__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.add, other))

    def __radd__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.add, other, swap=True))

    def __sub__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.subtract, other))

    def __rsub__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.subtract, other, swap=True))

    def __mul__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.multiply, other))

    def __rmul__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.multiply, other, swap=True))

    def __truediv__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.true_divide, other))

    def __rtruediv__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.true_divide, other, swap=True))

    def __neg__(self) -> Self:
        return self._with(-self.values)

    def __lt__(self, other: Any) -> Any:
        return self._apply(np.less, other)

    def __le__(self, other: Any) -> Any:
        return self._apply(np.less_equal, other)

    def __gt__(self, other: Any) -> Any:
        return self._apply(np.greater, other)

    def __ge__(self, other: Any) -> Any:
        return self._apply(np.greater_equal, other)

    def __eq__(self, other: object) -> Any:
        return self._apply(np.equal, other)

    def __ne__(self, other: object) -> Any:
        return self._apply(np.not_equal, other)

    def __and__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.logical_and, other))

    def __or__(self, other: Any) -> Self:
        return cast(Self, self._apply(np.logical_or, other))

    def __invert__(self) -> Self:
        return self._with(np.logical_not(self.values))
