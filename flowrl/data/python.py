"""Rows that a function of the user's returns."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal

from pydantic import Field

from flowrl.data.base import DataFault, Placed
from flowrl.data.child import made_in_a_child
from flowrl.data.streamed import StreamedTable
from flowrl.data.table import Line, Opened
from flowrl.data.values import Wrong, as_plain
from flowrl.errors import Problem


class Python(StreamedTable):
    """Rows from a function that returns an iterable of mappings."""

    type: Literal["python"] = "python"
    """Kind of data set."""
    call: str = Field(min_length=1)
    """The function: `my_pkg.module:function`, or `./file.py:function`, relative to the YAML file that names it."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Its arguments, by name."""

    rows_fix = "let the function give mappings with the same columns, and values of the same types, in every row"

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
        if self.columns is not None:
            try:
                self._function()
            except DataFault as fault:
                return [fault.problem(place)]
        return super().problems(place, num_needed, lower)

    def opened(self, checking: bool) -> Opened:
        """What the function returns; for a check, which has to end well, in a process of its own."""
        return Opened(made_in_a_child(self.call, partial(self._called, alone=True)) if checking else self._called())

    def _called(self, alone: bool = False) -> Iterator[Line]:
        function, told = self._function(), _Told(self.call, alone)
        with told:
            returned = function(**self.args)
        if inspect.iscoroutine(returned):
            returned.close()
        if isinstance(returned, (str, bytes, Mapping)) or not hasattr(returned, "__iter__"):
            kind = type(returned).__name__
            fix = "let it return a list of rows, or yield them: {'prompt': ..., 'answer': ...}"
            raise DataFault("call", f"'{self.call}' returned {kind}, not an iterable of mappings", fix)
        return self._lines(returned, told)

    def _lines(self, returned: Any, told: _Told) -> Iterator[Line]:
        number = 0
        with told:
            for number, row in enumerate(returned, 1):
                if isinstance(row, Mapping):
                    yield Line(number, *as_plain(dict(row)))
                else:
                    yield Line(number, {}, Wrong(f"it is {type(row).__name__}, not a mapping of columns and values"))

    def _function(self) -> Callable[..., Any]:
        """The function, which takes these arguments. Raises `DataFault`."""
        from flowrl.functions import BadFunction, find_function  # not needed to read a document

        try:
            function = find_function(self.call)
        except BadFunction as error:
            raise DataFault("call", str(error), "call: my_pkg.module:function, or ./file.py:function") from error
        try:
            inspect.signature(function).bind(**self.args)
        except TypeError as error:
            fix = f"args: what it takes, {self.call.rpartition(':')[2]}{inspect.signature(function)}"
            raise DataFault("args", f"'{self.call}' cannot take these arguments: {error}", fix) from error
        except ValueError:  # of something built in, whose arguments nobody can know
            pass
        return function


class _Told:
    """What the user's code raises inside becomes a `DataFault` that names its line.

    In a process where it is `alone`, an interruption is its own, too.
    """

    def __init__(self, call: str, alone: bool) -> None:
        self.call = call
        self.kinds = (Exception, SystemExit, KeyboardInterrupt) if alone else (Exception, SystemExit)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and isinstance(error, self.kinds):
            last = traceback.extract_tb(trace)[-1]
            said = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
            fact = f"'{self.call}' raised {said} ({last.filename}, line {last.lineno})"
            raise DataFault("call", fact, "correct the function, or what args: gives it") from error
