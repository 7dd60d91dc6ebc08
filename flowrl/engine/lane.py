"""One process that scores rows. It is killed with all that it started, and ends when its parent does.

It has guards: processes between it and the worker that run nothing of the user's, and so can always do that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, NoReturn

from flowrl.batch import Batch
from flowrl.engine.call import NodeSetup
from flowrl.engine.rowwise import Values, score_alone, score_together
from flowrl.metrics import Failure, Report, failure_of
from flowrl.node import Context, Node

CLOSE_SECONDS = 1.0
"""What a process may take to end by itself, once asked to."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of Linux's `prctl`."""
_SIGNALLED = 128
"""Added to the number of the signal that ended a process, as shells do."""

Answer = tuple[Values, Report] | Failure | None
"""Values and what was reported; what went wrong with the call, or with the set-up; None when set up."""


class Lane:
    """The parent's side: at most one batch is on its way at a time."""

    def __init__(self, spec: NodeSetup, context: Context) -> None:
        # Not fork: the worker has threads and a model. A fork server gives a process with numpy loaded in 10 ms.
        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(["flowrl.engine.lane", "psutil"])
        self._row: Any = processes.Value(ctypes.c_long, -1, lock=False)
        self._since: Any = processes.Value(ctypes.c_double, 0.0, lock=False)
        self.connection, there = processes.Pipe()
        self._process = processes.Process(
            target=_guard, args=(there, spec, context, self._row, self._since), daemon=True
        )
        with _without_main():
            self._process.start()
        there.close()
        self._sent = 0.0
        self.ready = False
        """Whether the node has been set up."""
        self.rows: list[int] = []
        """The rows that it is working on, by their numbers; empty when it is idle."""
        self.together = False
        """Whether they are one call."""

    @property
    def signs(self) -> list[Any]:
        """What `multiprocessing.connection.wait` must watch: an answer, or the end of the process."""
        return [self.connection, self._process.sentinel]

    @property
    def position(self) -> int:
        """The row that is running, by its place in what was sent; -1 before the first, and where all run together."""
        return int(self._row.value)

    @property
    def seconds(self) -> float:
        """How long the running row has taken; in a call of several, since the last sign of life."""
        return time.monotonic() - float(self._since.value)

    @property
    def took(self) -> float:
        """Seconds since the last batch was sent."""
        return time.monotonic() - self._sent

    def send(self, batch: Batch, rows: list[int], together: bool) -> None:
        """Score these rows."""
        self.rows, self.together = rows, together
        self._sent = time.monotonic()
        self._row.value, self._since.value = -1, self._sent
        with suppress(OSError):  # it has died; its sentinel says so
            self.connection.send((batch, together))

    def answer(self) -> Answer:
        """What it has sent. Raises `EOFError` when it has died, which only its own end can tell."""
        try:
            if not self.connection.poll():
                raise EOFError
            found: Answer = self.connection.recv()
        except OSError as error:
            raise EOFError from error
        return found

    def end(self) -> str:
        """How a process that sends nothing any more has ended."""
        self._process.join(CLOSE_SECONDS)
        code = self._process.exitcode
        if code is None:
            return "silent"
        number = -code if code < 0 else code - _SIGNALLED  # of the outer guard itself, or passed on by it
        return _name(number) if number > 0 else f"exit code {code}"

    def kill(self) -> None:
        """Let the process end now, with all that it started; `join` waits for that."""
        self._process.terminate()
        self.connection.close()

    def join(self) -> None:
        """Wait for the end of a killed process."""
        self._process.join(2 * CLOSE_SECONDS)
        self._process.kill()
        self._process.join()

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def ask_to_end(self) -> None:
        """Let it close its node; `kill` it afterwards."""
        with suppress(OSError):
            self.connection.send(None)

    def wait_for_end(self, until: float) -> None:
        """Wait for the end that was asked for, until that moment of `time.monotonic`."""
        self._process.join(max(0.0, until - time.monotonic()))


@contextmanager
def _without_main() -> Iterator[None]:
    """A process started inside does not import the main module again: a Ray worker's takes half a second.

    Nodes are found by the names of their modules, or by the text of their files, never in the main module.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _guard(connection: Connection, spec: NodeSetup, context: Context, row: Any, since: Any) -> None:
    """The process that the worker starts: it starts the one that scores, and ends with it, or when it is told to.

    Between them is another guard, so that a row may kill either: the one left ends what is below.
    """
    os.setsid()  # a Ctrl-C is the driver's
    scoring = _started(signal.SIGTERM)
    if not scoring:
        scoring = _started(signal.SIGKILL)
        if not scoring:
            os.setsid()  # a row that signals its own group does not mean the guards
            # What a row starts may be anything, other processes among it; those are ended with this one.
            multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
            _serve(connection, spec, context, row, since)
            sys.stdout.flush()
            os._exit(0)
        connection.close()
        _wait_for(scoring)
    connection.close()
    parent = multiprocessing.parent_process()
    assert parent is not None, "it was started by a worker"
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    _wait_for(scoring)


def _started(signal_of_end: int) -> int:
    """Fork: the child's id in the parent, and 0 in the child, which gets this signal when the parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # whoever loses its parent below becomes a child of this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = os.getpid()
    child = os.fork()
    if not child:
        _prctl(_PR_SET_PDEATHSIG, signal_of_end)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)
    return child


def _wait_for(child: int) -> NoReturn:
    """Wait for its end, or to be told to end; then kill all that is below this process, and end as it did."""
    code = 0
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_children()
        os._exit(code if code >= 0 else _SIGNALLED - code)


def _end_with(sentinel: int) -> None:
    """End this process as if it had been told to when its parent is gone."""
    wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _kill_children() -> None:
    """Kill all that this process has started, and what that has, until nothing is left."""
    import psutil

    until = time.monotonic() + CLOSE_SECONDS
    while (found := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for process in found:
            with suppress(psutil.Error):
                process.kill()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    """A setting of this process that only Linux has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _name(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def _serve(connection: Connection, spec: NodeSetup, context: Context, row: Any, since: Any) -> None:
    """The process: set the node up, then score what comes until the end is asked for."""
    try:
        node = spec.made()
        node.setup(context)
    except BaseException as error:
        connection.send(failure_of((), error))
        return
    connection.send(None)

    def started(position: int) -> None:
        row.value, since.value = position, time.monotonic()

    with suppress(EOFError, OSError):
        while (job := connection.recv()) is not None:
            batch, together = job
            connection.send(_scored(node, spec, batch, together, started))
    node.close()


def _scored(node: Node, spec: NodeSetup, batch: Batch, together: bool, started: Any) -> tuple[Values, Report] | Failure:
    if not together:
        return score_alone(node, spec.reads, batch, started)
    try:
        return score_together(node, spec.reads, batch, started)
    except BaseException as error:
        return failure_of(batch.rows.names(), error)
