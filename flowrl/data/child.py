"""A process of its own for a function of the user's: one that exits, crashes or never returns ends nothing else.

A check calls functions there. A run calls them in its own process: their rows may be many, and streamed for days.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import IO, Any

from flowrl.data.base import DataFault

LIMIT = 30.0
"""Seconds that a check waits for the rows of a function."""
_START = "import pickle, sys; sys.path[:], made = pickle.load(sys.stdin.buffer); from flowrl.data import child; "


def made_in_a_child(name: str, make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """What the picklable `make` gives, in another process. Raises `DataFault`, also the one that it raises there.

    `name` is what to call the user's function.
    """
    # What was sent can only be read once modules are looked for where they are here.
    command = [sys.executable, "-c", f"{_START}child.serve(pickle.loads(made))"]
    late = threading.Event()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:

        def stop() -> None:
            late.set()
            _end(process)

        timer = threading.Timer(LIMIT, stop)
        timer.daemon = True
        timer.start()
        try:
            for said in _received(process, make):
                if said is None:
                    return
                if isinstance(said, DataFault):
                    raise said
                yield said
            code = process.wait()
        finally:
            timer.cancel()
            _end(process)
    if late.is_set():
        fix = "columns: {NAME: TYPE} declares what it gives, and a check then calls nothing"
        raise DataFault("call", f"'{name}' has not given its rows within {LIMIT:g} s", fix)
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    fix = "let it return or yield its rows, and raise what is wrong"
    raise DataFault("call", f"'{name}' ended the process that it runs in ({how})", fix)


def serve(make: Callable[[], Iterable[Any]]) -> None:
    """In the other process: hand over what is made, then None; or the fault that is raised."""
    # What the function prints is no part of that, and nobody answers what it asks.
    with os.fdopen(os.dup(1), "wb") as out, open(os.devnull, "rb") as nothing:
        os.dup2(2, 1)
        os.dup2(nothing.fileno(), 0)
        try:
            for one in make():
                _hand_over(one, out)
            _hand_over(None, out)
        except DataFault as fault:
            _hand_over(DataFault(fault.keys, fault.fact, fault.fix), out)


def _hand_over(one: Any, out: IO[bytes]) -> None:
    pickle.dump(one, out)
    out.flush()


def _received(process: subprocess.Popen[bytes], make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """What the other process hands over until it ends."""
    assert process.stdin is not None and process.stdout is not None, "asked for"
    with suppress(BrokenPipeError):  # it has ended already, for which there is a reason to be told
        pickle.dump((sys.path, pickle.dumps(make)), process.stdin)
        process.stdin.close()
    with suppress(EOFError, pickle.UnpicklingError):  # it ended in the middle
        while True:
            yield pickle.load(process.stdout)


def _end(process: subprocess.Popen[bytes]) -> None:
    """With what it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
