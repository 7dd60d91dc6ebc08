"""What a row does to signals ends with it: an alarm that it leaves running, a handler or a mask that it has changed."""

from __future__ import annotations

import signal
import threading
import time
from types import TracebackType
from typing import Any

TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
HANDLED = (
    signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD,
    signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
"""What programs handle; to look at all of them would take longer than many a row."""


class Signals:
    """`with signals:` restores timers, handlers and the mask of when it was made, as often as it is used.

    Only the main thread has them; elsewhere it does nothing.
    """

    def __init__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        self._handlers: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in HANDLED}
        self._timers = {timer: signal.getitimer(timer) for timer in TIMERS}
        self._start = time.monotonic()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._is_main:
            try:
                self._restore()
                return
            except BaseException:  # a handler of the row's rang in here; the row is done
                continue

    def _restore(self) -> None:
        for timer, (seconds, interval) in self._timers.items():
            left = seconds and max(1e-3, seconds - (time.monotonic() - self._start))
            signal.setitimer(timer, left, interval)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)  # what was held back is for the row's own handler
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
