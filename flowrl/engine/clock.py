"""The time of the loop: that of this machine, or of a simulation whose clock jumps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

CLOCK: ContextVar[Callable[[], float] | None] = ContextVar("flowrl_clock", default=None)
"""What `now` reads, for whatever runs in this context; None is the clock of this machine."""


def now() -> float:
    """Seconds since the epoch; in a simulation, since its start."""
    clock = CLOCK.get()
    return time.time() if clock is None else clock()
