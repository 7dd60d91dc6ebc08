"""Rows that a function of the user's returns."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from pydantic import Field

from flowrl.data.base import DataFault, Placed
from flowrl.data.table import Line, Opened, StreamedTable
from flowrl.data.values import as_plain
from flowrl.errors import Problem


class Python(StreamedTable):
    """Rows from a function that returns an iterable of mappings."""

    type: Literal["python"] = "python"
    """Kind of data set."""
    call: str = Field(min_length=1)
    """The function: `my_pkg.module:function`, or `./file.py:function`, relative to the YAML file that names it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, by name."""

    @property
    def origin(self) -> str:
        """The function."""
        return self.call

    @property
    def source_key(self) -> str:
        """Where the function is named."""
        return "call"

    @property
    def read_by_check(self) -> bool:
        """Declared columns are believed, and nothing is called for them."""
        return self.columns is None

    def problems(self, place: Placed, num_needed: int = 1, lower: str = "batch.prompts") -> list[Problem]:
        """A function that is not there or takes other arguments; also what it raises, unless columns are declared."""
        try:
            self._function()
        except DataFault as fault:
            return [fault.problem(place)]
        return super().problems(place, num_needed, lower)

    def opened(self, checking: bool) -> Opened:
        """What the function returns."""
        function = self._function()
        with _Told(self.call):
            returned = function(**self.args)
        if inspect.iscoroutine(returned):
            returned.close()
        if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
            kind = type(returned).__name__
            raise DataFault("call", f"'{self.call}' returned {kind}, not an iterable of mappings")
        return Opened(self._lines(returned))

    def _lines(self, returned: Any) -> Iterator[Line]:
        number = 0
        with _Told(self.call):
            for number, row in enumerate(returned, 1):
                if isinstance(row, Mapping):
                    yield Line(number, *as_plain(dict(row)))
                else:
                    yield Line(number, {}, f"it is {type(row).__name__}, not a mapping of columns and values")

    def _function(self) -> Callable[..., Any]:
        """The function, which takes these arguments. Raises `DataFault`."""
        from flowrl.functions import BadFunction, find_function  # not needed to read a document

        try:
            function = find_function(self.call)
        except BadFunction as error:
            raise DataFault("call", str(error)) from error
        try:
            inspect.signature(function).bind(**self.args)
        except TypeError as error:
            raise DataFault("args", f"'{self.call}' cannot take these arguments: {error}") from error
        except ValueError:  # of something built in, whose arguments nobody can know
            pass
        return function


class _Told:
    """What the user's code raises inside becomes a `DataFault` that names its line."""

    def __init__(self, call: str) -> None:
        self.call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            last = traceback.extract_tb(trace)[-1]
            said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            fact = f"'{self.call}' raised {said} ({last.filename}, line {last.lineno})"
            raise DataFault("call", fact) from error
