"""What rewards share: one bad row hurts no other, whatever a judgement returns becomes a score, and rows wait together.

A failure is reported and leaves the row without a value; it is never a score.
"""

from __future__ import annotations

import asyncio
import math
import numbers
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any, TypeVar

import numpy as np

from flowrl.encode import native
from flowrl.metrics import failure
from flowrl.rows import Rows

T = TypeVar("T")
CALLS_AHEAD = 16
"""Rows that are begun in one go, for each that runs at once: so a slow one holds up few."""


LARGEST = float(np.finfo(np.float32).max)
"""A column of floats holds no more."""


class BadAnswer(ValueError):
    """What came back is no score; the message says what it was."""


def scored(rows: Rows, judge: Callable[[int], T], *errors: type[BaseException]) -> list[T | None]:
    """What `judge` says of each row, by its position; None, and a failure, where it raises an exception or `errors`."""
    found: list[T | None] = []
    failures: tuple[type[BaseException], ...] = (Exception, *errors)
    for position, name in enumerate(rows.names()):
        try:
            found.append(judge(position))
        except failures as error:
            failure([name], error)
            found.append(None)
    return found


def score_of(value: Any) -> float:
    """A number, bool, numpy scalar or array of no dimension as a finite float. Raises `BadAnswer` for all else."""
    item = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(item, (numbers.Real, Decimal)):
        raise BadAnswer(f"it returned {_short(value)}, which is no number")
    try:
        score = float(item)
    except (OverflowError, ValueError):  # of a whole number without end, and of a Decimal that signals
        raise BadAnswer(f"it returned {_short(item)}, which is no score") from None
    if not math.isfinite(score):
        raise BadAnswer(f"it returned {_short(item)}, which is no score")
    if abs(score) > LARGEST:
        raise BadAnswer(f"it returned {score:g}, which is more than a score can be ({LARGEST:.2g})")
    return score


def judgement(value: Any, key: str) -> tuple[float, Any]:
    """The score and what else is known: a mapping holds the score under `key`. Raises `BadAnswer`."""
    if not isinstance(value, Mapping):
        return score_of(value), None
    if key not in value:
        known = ", ".join(map(repr, value)) or "none"
        raise BadAnswer(f"it returned a dict without {key!r} (its keys: {known}); reward_key says which is the score")
    return score_of(value[key]), native({name: one for name, one in value.items() if name != key})


def _short(value: Any) -> str:
    try:
        shown = repr(value)
    except Exception:  # of a class of the user's, or of a number with more digits than Python shows
        shown = f"a value of type {type(value).__name__} that cannot be shown"
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


class Crew:
    """An event loop that a node keeps: what its coroutines open, such as connections, lives from call to call."""

    def __init__(self) -> None:
        self._runner, self._thread = asyncio.Runner(), ThreadPoolExecutor(1)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of one coroutine."""
        result: T = self._outside(self._runner.run, coroutine)
        return result

    def as_done(
        self, num: int, judge: Callable[[int], Awaitable[T]], at_once: int, timeout: float | None
    ) -> Iterator[tuple[int, T | BaseException]]:
        """What `judge` says of 0 to num - 1, or raises, as it comes; so many at once, each with so many seconds."""
        queue: asyncio.Queue[tuple[int, T | BaseException]] = asyncio.Queue()
        slots = asyncio.Semaphore(at_once)

        async def one(position: int) -> None:
            async with slots:
                queue.put_nowait((position, await _outcome(judge, position, timeout)))

        async def start() -> list[asyncio.Task[None]]:
            return [asyncio.create_task(one(position)) for position in range(num)]

        async def stop(tasks: list[asyncio.Task[None]]) -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        tasks = self.run(start())
        try:
            for _ in range(num):
                yield self.run(queue.get())
        finally:
            self.run(stop(tasks))

    def judged(
        self, rows: Rows, judge: Callable[[int], Awaitable[tuple[float, Any]]], at_once: int, timeout: float | None
    ) -> Iterator[tuple[Rows, tuple[float, Any]]]:
        """Score and further knowledge of each row as it comes; NaN and None, and a failure, where `judge` raises."""
        names = rows.names()
        for position, found in self.as_done(len(rows), judge, at_once, timeout):
            if isinstance(found, BaseException):
                failure([names[position]], found)
                found = (math.nan, None)
            yield rows.take(np.array([position])), found

    def close(self) -> None:
        """End the loop."""
        self._outside(self._runner.close)
        self._thread.shutdown()

    def _outside(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call it where no other loop runs: in this thread, unless the driver's own loop does (`--local`)."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return call(*arguments)
        return self._thread.submit(call, *arguments).result()


async def _outcome(judge: Callable[[int], Awaitable[T]], position: int, timeout: float | None) -> T | BaseException:
    try:
        async with asyncio.timeout(timeout) as limit:
            return await judge(position)
    except BaseException as error:  # an exit or an interruption inside a row is the row's, as everywhere
        if not limit.expired():
            return error
        # What `judge` said of itself when it was cancelled, such as what a server answered until then.
        why = f"; {error.__cause__}" if error.__cause__ is not None and str(error.__cause__) else ""
        return TimeoutError(f"no answer within {timeout:g} s{why}")
