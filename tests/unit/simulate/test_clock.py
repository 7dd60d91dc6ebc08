"""The clock that jumps."""

from __future__ import annotations

import asyncio
import time

import pytest

from flowrl.engine.clock import now
from flowrl.simulate.clock import simulated


def test_an_hour_passes_at_once_and_in_order() -> None:
    seen: list[tuple[str, float]] = []

    async def wait(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((name, now()))

    async def work() -> float:
        await asyncio.gather(wait("late", 3600.0), wait("early", 60.0))
        return now()

    start = time.perf_counter()
    assert simulated(work()) == 3600.0
    assert seen == [("early", 60.0), ("late", 3600.0)]
    assert time.perf_counter() - start < 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize("start", [1e8 / 3, 1e11 / 3])
def test_timers_strike_also_after_years(start: float) -> None:
    async def work() -> float:
        await asyncio.sleep(start)
        for number in range(1, 200):
            await asyncio.gather(asyncio.sleep(1 / number), asyncio.sleep(0.1))
        return now()

    whole = start + sum(max(1 / number, 0.1) for number in range(1, 200))
    assert simulated(work()) == pytest.approx(whole, abs=1e-2)


def test_tasks_that_are_started_inside_see_the_same_clock() -> None:
    async def work() -> tuple[float, float]:
        await asyncio.sleep(5)
        task = asyncio.ensure_future(asyncio.sleep(2, result=None))
        await task
        return now(), asyncio.get_running_loop().time()

    assert simulated(work()) == (7.0, 7.0)


def test_outside_a_simulation_it_is_the_time_of_this_machine() -> None:
    simulated(asyncio.sleep(1e6))
    assert abs(now() - time.time()) < 5


def test_a_timeout_strikes_when_its_time_has_come() -> None:
    async def work() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(31)
        return now()

    assert simulated(work()) == 30.0


def test_waiting_for_what_never_comes_is_an_error_and_no_hang() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nobody will do"):
        simulated(work())
