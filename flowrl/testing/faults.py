"""What was found of a property of a node, and how a fault is told."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path
from typing import NamedTuple

from flowrl.node import Node


class Verdict(NamedTuple):
    """Whether a property holds; None where there was nothing to try, with the reason."""

    name: str
    holds: bool | None
    details: str = ""


class Fault(Exception):
    """The property does not hold; the message says how."""


class Untried(Exception):
    """The property says nothing of this node; the message says why."""


def error_of(cls: type[Node], error: BaseException) -> str:
    """The error with the last line of the class's own file that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([one for one in frames if one.filename == inspect.getsourcefile(cls)] or frames)[-1]
    return f"{type(error).__name__}: {error}\n{Path(frame.filename).name}:{frame.lineno}: {frame.line}"


def said(where: str, fact: str) -> str:
    """A fact with where it was found, if that needs saying."""
    return f"{where}: {fact}" if where else fact
