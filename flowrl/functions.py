"""Functions that a parameter names: `pkg.mod:function`, or `./file.py:function`, whose text travels to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flowrl.errors import nearest
from flowrl.registry import BrokenNode, NodeRef, UnknownNode, ref_to_file

_sent: ContextVar[Mapping[str, str] | None] = ContextVar("flowrl_sent_code", default=None)
"""Text of files of code by path, as the driver has read them; on a worker's machine they may be others, or none."""


class BadFunction(ValueError):
    """A parameter names no function that can be used; the message says why."""


def find_function(name: str) -> Callable[..., Any]:
    """The function that a name stands for. Raises `BadFunction`."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise BadFunction(f"'{name}' names no function: write pkg.module:function or ./file.py:function")
    try:
        if where.endswith(".py"):
            ref = ref_to_file(name, Path(where), where, function, (_sent.get() or {}).get(where))
        elif all(part.isidentifier() for part in where.split(".")):
            ref = NodeRef(name, where, function)
        else:
            raise BadFunction(
                f"'{where}' is neither a module, such as my_pkg.rewards, nor a file, such as ./rewards.py"
            )
        module = ref.imported()
    except (UnknownNode, BrokenNode) as error:
        raise BadFunction(str(error)) from error
    found = getattr(module, function, None)
    if found is None:
        known = [one for one, value in vars(module).items() if callable(value) and one[0] != "_"]
        raise BadFunction(f"'{where}' has no function '{function}'; {nearest(function, known) or 'it has none at all'}")
    if not callable(found):
        raise BadFunction(f"'{function}' in {where} is no function, but {type(found).__name__}")
    made: Callable[..., Any] = found
    return made


def code_named_in(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Text of the files that functions among the parameters are named in, by path."""
    named = [value.rpartition(":")[0] for value in parameters.values() if isinstance(value, str)]
    return {path: Path(path).read_text(encoding="utf-8") for path in named if path.endswith(".py")}


@contextmanager
def sent_code(texts: Mapping[str, str]) -> Iterator[None]:
    """Inside, files of code have these texts, whatever lies on this machine."""
    token = _sent.set(texts)
    try:
        yield
    finally:
        _sent.reset(token)
