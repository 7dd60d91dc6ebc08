"""Calls of several threads to one engine: they take turns with its model; while something stops it, none has one."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from flowrl.nodes._backend.engine import Request, require_whole

ASLEEP, UPDATING = "asleep", "updating"
"""What stops an engine."""


class Running:
    """One call that generates."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.names = frozenset(request.name for request in requests)
        self.aborted: set[str] = set()
        """Names of requests that are to end now."""
        self.num_heeded = 0
        """How many of them the call knows of."""


class Turns:
    """See the module docstring. A turn is a moment, such as one token: whoever stops the engine waits for its end."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Held while anything here changes, and told of it."""
        self.stopped: set[str] = set()
        """What stops the engine now."""
        self._broken = False
        self._running: set[Running] = set()
        self._line: list[Running] = []
        self._holder: Running | None = None

    @contextmanager
    def running(self, requests: Sequence[Request]) -> Iterator[Running]:
        """A call, as long as it lasts."""
        call = Running(requests)
        with self.changed:
            self._running.add(call)
        try:
            yield call
        finally:
            with self.changed:
                self._running.discard(call)

    @contextmanager
    def turn(self, call: Running) -> Iterator[bool]:
        """Wait for a turn with the model: True. False where requests of the call were aborted before one came.

        Raises `RuntimeError` where the model holds only a part of its weights, and no more of them will come.
        """
        with self.changed:
            self._line.append(call)
            try:
                self.changed.wait_for(lambda: self._broken or self.is_aborted(call) or self._is_next(call))
            finally:
                self._line.remove(call)
                self.changed.notify_all()
            require_whole(self._broken)
            granted = not self.is_aborted(call)
            call.num_heeded = len(call.aborted)
            if granted:
                self._holder = call
        try:
            yield granted
        finally:
            if granted:
                with self.changed:
                    self._holder = None
                    self.changed.notify_all()

    def is_aborted(self, call: Running) -> bool:
        """Whether requests of a call are to end of which it does not know yet."""
        return len(call.aborted) > call.num_heeded

    def _is_next(self, call: Running) -> bool:
        return not self.stopped and self._holder is None and self._line[0] is call

    def stop(self, why: str) -> None:
        """Give no turn until `go`; returns when the last one has ended."""
        with self.changed:
            self.stopped.add(why)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._holder is None)

    def go(self, why: str) -> None:
        """Give turns again, unless something else stops them."""
        with self.changed:
            self.stopped.discard(why)
            self.changed.notify_all()

    def updated(self) -> None:
        """The model has all of its weights."""
        with self.changed:
            self._broken = False
        self.go(UPDATING)

    @contextmanager
    def whole_or_broken(self) -> Iterator[None]:
        """A part of an update: what goes wrong in it ends every call, until another update has come to its end."""
        try:
            yield
        except BaseException:
            with self.changed:
                self._broken = True
                self.changed.notify_all()
            raise

    def abort(self, names: Collection[str]) -> None:
        """Let the calls that run end the requests of these names."""
        with self.changed:
            for call in self._running:
                call.aborted |= call.names.intersection(names)
            self.changed.notify_all()
