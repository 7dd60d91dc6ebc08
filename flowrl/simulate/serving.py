"""What one worker generates: groups that are decoded together, a token of each of their sequences in every step.

A step takes `step_seconds` and, for each sequence in it, `sequence_seconds`: reading the weights, and computing with
them. So all groups move on at the same speed, and a group ends when so many steps have been made since it began.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from flowrl.simulate.costs import Decoding, Response

_ALMOST = 1e-3
"""Steps that are too few to wait for: what adding up seconds has lost."""


@dataclass(frozen=True)
class Served:
    """A group on its way through an engine."""

    uid: str
    call: int
    """Number of the call that asked for it."""
    response: Response
    version: int
    """Of the weights that made its first tokens."""
    begin: float
    """Steps that the engine had made before."""
    ended: asyncio.Future[Served]

    @property
    def end(self) -> float:
        """Steps that the engine has made when it is done."""
        return self.begin + self.response.steps


class Serving:
    """The engine of a worker; `busy` is told of every span in which it made tokens."""

    def __init__(self, cost: Decoding, busy: Callable[[float, float], None]) -> None:
        self.cost, self.version = cost, 0
        self._busy = busy
        self._waiting: deque[tuple[str, int, Response, asyncio.Future[Served]]] = deque()
        self._running: dict[str, Served] = {}
        self._ends: list[tuple[float, int, str]] = []
        self._calls: Counter[int] = Counter()
        self._num_sequences = self._steps = self._since = self._debt = 0.0
        self._began = math.nan
        self._number = 0
        self._stopped: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, uid: str, call: int, response: Response) -> asyncio.Future[Served]:
        """Generate a group, as soon as there is room; the future has it when it is done."""
        ended: asyncio.Future[Served] = asyncio.get_running_loop().create_future()
        self._advance()
        self._waiting.append((uid, call, response, ended))
        self._go_on()
        return ended

    def stop(self, why: str) -> None:
        """Make no token until `go`."""
        self._advance()
        self._stopped.add(why)
        self._go_on()

    def go(self, why: str) -> None:
        """Go on, unless something else stops it, after reading again what each sequence has so far."""
        self._advance()
        was_stopped = bool(self._stopped)
        self._stopped.discard(why)
        if was_stopped and not self._stopped:
            self._debt = sum(self._tokens(each) for each in self._running.values()) * self.cost.prefix_seconds
        self._go_on()

    def abort(self, uids: Collection[str]) -> None:
        """End groups now."""
        self._advance()
        for group in [group for group in self._waiting if group[0] in uids]:
            self._waiting.remove(group)
            self._begin(*group)
        for uid in set(uids) & self._running.keys():
            self._finish(uid)
        self._go_on()

    def _tokens(self, group: Served) -> float:
        return self.cost.prompt_tokens + (self._steps - group.begin) * group.response.width

    @property
    def _step_seconds(self) -> float:
        num_steps = len(self._calls) if self.cost.one_call_a_step else 1
        return num_steps * self.cost.step_seconds + self._num_sequences * self.cost.sequence_seconds

    def _advance(self) -> None:
        """Count what was made since the last time."""
        now = asyncio.get_running_loop().time()
        seconds, self._since = now - self._since, now
        if self._stopped or not self._running:
            return
        read = min(self._debt, seconds)
        self._debt -= read
        if seconds > read:
            self._steps += (seconds - read) / self._step_seconds

    def _go_on(self) -> None:
        """Begin what there is room for, and come back when the next group is done."""
        while self._waiting and len(self._running) < self.cost.max_groups:
            self._begin(*self._waiting.popleft())
        active = bool(self._running) and not self._stopped
        if active == math.isnan(self._began):
            if not active:
                self._busy(self._began, self._since)
            self._began = self._since if active else math.nan
        if self._timer is not None:
            self._timer.cancel()
        if active:
            seconds = self._debt + max(0.0, self._ends[0][0] - self._steps) * self._step_seconds
            self._timer = asyncio.get_running_loop().call_later(seconds, self._settle)

    def _begin(self, uid: str, call: int, response: Response, ended: asyncio.Future[Served]) -> None:
        group = Served(uid, call, response, self.version, self._steps, ended)
        self._number += 1
        self._running[group.uid] = group
        self._calls[group.call] += 1
        self._num_sequences += group.response.width
        self._debt += self.cost.prompt_tokens * self.cost.prefix_seconds
        heapq.heappush(self._ends, (group.end, self._number, group.uid))

    def _settle(self) -> None:
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + _ALMOST:
            self._finish(self._ends[0][2])
        self._go_on()

    def _finish(self, uid: str) -> None:
        group = self._running.pop(uid)
        self._calls[group.call] -= 1
        self._calls += Counter()
        self._num_sequences = self._num_sequences - group.response.width if self._running else 0.0
        while self._ends and self._ends[0][2] not in self._running:
            heapq.heappop(self._ends)
        if not group.ended.done():
            group.ended.set_result(group)
