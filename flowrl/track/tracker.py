"""What all trackers have in common: one background thread, so that none of them slows a step or stops training.

Importing MLflow or wandb takes 1 to 3 s, starting a fresh SQLite store 2.4 s and logging 45 metrics 12 ms; none of it
is waited for. The thread is our own and a daemon, because the queues of those packages are joined when the interpreter
exits, and so hang the end of a run whose server is away. What cannot be sent is kept and tried again; the first trouble
of each kind is noted.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flowrl.schedule.record import Recorder, Samples, Status
from flowrl.track.record import Note

SEND_SECONDS = 1.0
"""Metrics of this long travel together: a commit of SQLite costs about the same for one step as for ten."""
RETRY_SECONDS = 10.0
LOCAL_SECONDS = 60.0
"""A file cannot be away: a fresh one only takes its time to be made, on a busy machine more than `CLOSE_SECONDS`."""
CLOSE_SECONDS: dict[Status, float] = {"finished": 10.0, "failed": 10.0, "interrupted": 3.0}
"""Longest wait at the end of a run; less after Ctrl-C, when somebody waits for the prompt."""
MAX_WAITING = 200_000
"""Values kept while a server is away, about 4,000 steps; later ones are not sent."""
MAX_TABLES = 100
"""Tables of samples kept while a tracker is busy; they are in the run folder anyway."""
MAX_BATCH = 1000
"""Values sent at a time: as many as MLflow takes."""
RUN_IDS = "trackers.json"

Complain = Callable[[str, str], None]
"""Passes on a text about trouble, once for each topic."""


class Point(NamedTuple):
    """A finite value of a metric."""

    name: str
    value: float
    milliseconds: int
    """Since the epoch."""
    step: int


class Service(ABC):
    """Where a tracker sends to. Everything is called in the tracker's thread, and may raise and block."""

    shown: str
    """What it is called in messages."""
    local: bool = False
    """Whether it needs no network."""

    @property
    def key(self) -> str:
        """What it is called in `trackers.json`: no other tracker of a run is."""
        return self.shown

    @abstractmethod
    def connect(self, run_id: str, complain: Complain) -> str:
        """Begin a run, or go on with the one of this id, which is empty for a new one; the id that the run has."""

    @abstractmethod
    def send(self, points: Sequence[Point]) -> None:
        """Send values, in the order of their steps; called with the same ones again if it raises."""

    @abstractmethod
    def show(self, samples: Samples) -> None:
        """Send a table; tried once."""

    @abstractmethod
    def end(self, status: Status) -> None:
        """The run has ended."""


class RunIds:
    """`trackers.json` in the run folder: the ids that trackers gave the run, for a resumed run to go on with."""

    def __init__(self, folder: Path, resumed: bool) -> None:
        self._path, self._lock = folder / RUN_IDS, threading.Lock()
        self._ids: dict[str, str] = {}
        if resumed and self._path.exists():
            self._ids = json.loads(self._path.read_text(encoding="utf-8"))

    def of(self, service: str) -> str:
        """The id of the run that is to go on; empty where there is none."""
        return self._ids.get(service, "")

    def keep(self, service: str, run_id: str) -> None:
        """Remember an id, if there is one."""
        with self._lock:
            if run_id and self._ids.get(service) != run_id:
                self._ids[service] = run_id
                new = self._path.with_suffix(".tmp")
                new.write_text(json.dumps(self._ids, indent=2), encoding="utf-8")
                os.replace(new, self._path)


class Ending:
    """The end of a run, of which all trackers hear at once: they end side by side."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.status: Status = "finished"
        self._since = math.inf

    def begin(self, status: Status) -> None:
        """The run has ended; later calls change nothing."""
        if not self.begun.is_set():
            self.status, self._since = status, time.monotonic()
            self.begun.set()

    def seconds_left(self, local: bool) -> float:
        """How long a tracker may still take."""
        limit = LOCAL_SECONDS if local and self.status == "finished" else CLOSE_SECONDS[self.status]
        return max(0.0, self._since + limit - time.monotonic())


class Tracker(Recorder):
    """Hands metrics and samples to a service, from a thread of its own."""

    def __init__(self, service: Service, ids: RunIds, ending: Ending, note: Note) -> None:
        self._service, self._ids, self._ending, self._note = service, ids, ending, note
        self._connected = False
        self._waiting: list[Point] = []
        self._tables: list[Samples] = []
        self._trouble: list[str] = []
        self._complaints: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"flowrl {service.shown}", daemon=True)
        self._thread.start()

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Hand the metrics to the thread; NaN and infinity leave a gap, as not every tracker can draw them."""
        now = int(time.time() * 1000)
        if len(self._waiting) < MAX_WAITING:
            values = metrics.items()
            self._waiting += [Point(name, float(value), now, step) for name, value in values if math.isfinite(value)]
        self._tell()

    def samples(self, samples: Samples) -> None:
        """Hand the table to the thread."""
        if len(self._tables) < MAX_TABLES:
            self._tables.append(samples)

    def close(self, status: Status, errors: Sequence[str] = ()) -> None:
        """Send what is left and end the run there, within the time that there is."""
        self._ending.begin(status)
        self._thread.join(self._ending.seconds_left(self._service.local))
        if self._thread.is_alive():
            self._complain("close", "did not answer in time; its last values may be missing")
        self._tell()

    def _tell(self) -> None:
        """Pass the thread's trouble on; only ever in the caller's thread, so that no other recorder needs a lock."""
        while self._trouble:
            self._note(self._trouble.pop(0), "warning")

    def _complain(self, topic: str, text: str) -> None:
        """Something to pass on, once a topic; without the password that a URI may hold."""
        if topic not in self._complaints:
            self._complaints.add(topic)
            self._trouble.append(re.sub(r"//[^/@\s]*@", "//", f"{self._service.shown} {text}"))

    def _work(self) -> None:
        while True:
            last = self._ending.begun.is_set()  # read first: whatever was handed over before the end is still sent
            seconds = SEND_SECONDS
            try:
                self._send(last)
            except Exception as error:  # whatever it is, training goes on
                seconds = RETRY_SECONDS
                self._complain("send", f"failed; training goes on, and it is tried again: {brief(error)}")
            if last:
                return
            self._ending.begun.wait(seconds)

    def _send(self, last: bool) -> None:
        service = self._service
        if not self._connected:
            self._ids.keep(service.key, service.connect(self._ids.of(service.key), self._complain))
            self._connected = True
        while batch := self._waiting[:MAX_BATCH]:
            service.send(batch)
            del self._waiting[: len(batch)]
        while self._tables:
            try:
                service.show(self._tables.pop(0))
            except Exception as error:  # metrics must not wait for it
                self._complain("samples", f"did not take a table of samples: {brief(error)}")
        if last:
            service.end(self._ending.status)


def brief(error: Exception) -> str:
    """One line: type, and the first line of the message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
