"""The time of the loop: that of this machine, or of a simulation whose clock jumps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar

CLOCK: ContextVar[Callable[[], float]] = ContextVar("flowrl_clock", default=time.time)
"""What `now` reads, for whatever runs in this context."""


def now() -> float:
    """Seconds since the epoch; in a simulation, since its start."""
    return CLOCK.get()()
