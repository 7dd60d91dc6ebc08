"""A clock that jumps: an event loop that never waits, so that hours pass in milliseconds."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from flowrl.engine.clock import CLOCK

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Where a loop would wait for its next timer, it is that late already."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What is there now. Raises `RuntimeError` where the loop would wait for ever."""
        found = super().select(0)
        if timeout is None and not found:
            raise RuntimeError("the simulation waits for something that nobody will do")
        self.now += timeout or 0.0
        return found


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop in seconds since its start."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Seconds since the start."""
        # After a few months a nanosecond, what asyncio takes for the resolution, is less than what tells two floats
        # apart: a timer that is due now would be so for ever.
        self._clock_resolution = max(1e-9, 2 * math.ulp(self._jumping.now))
        return self._jumping.now


def simulated(work: Coroutine[Any, Any, T]) -> T:
    """The result of work whose every wait takes no time; `flowrl.engine.clock.now` tells the simulated one."""

    async def timed() -> T:
        CLOCK.set(asyncio.get_running_loop().time)
        return await work

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(timed())
