"""Scoring rows one by one in processes that can be killed: one bad row hurts no other.

A row that raises, or takes longer than `timeout`, stays without a value and is reported with its name. Rows are sent in
chunks that take about a tenth of a second, so that a killed process costs no more work than that. Where rows take long
there are several processes, as many as there are cores.

A node that takes several rows in a call (`Node.rows_per_call`) gets them together; a call that fails is tried again row
by row.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from flowrl.batch import Batch, Sample
from flowrl.column import Column, as_array
from flowrl.engine.call import NodeSetup
from flowrl.engine.lane import CLOSE_SECONDS, Lane
from flowrl.engine.rowwise import Values, score_alone, score_together
from flowrl.join import take
from flowrl.metrics import Failure, Report, failure, replay
from flowrl.node import Context
from flowrl.rows import Rows

DEFAULT_TIMEOUT = 30.0
CHUNK_SECONDS = 0.1
MAX_CHUNK = 4096
START_SECONDS = 0.5
"""Work that is worth another process."""
MAX_LANES = 8
LOOK_SECONDS = 0.5
"""How often a running row is looked at, at least."""
GRACE_SECONDS = 0.5
"""What a call of several rows, which keeps to the time limit of each by itself, has beyond it."""


class Scorer:
    """Runs one node row by row, outside the worker's own process when it may be killed."""

    def __init__(self, spec: NodeSetup, context: Context, can_kill: bool) -> None:
        self.spec = spec
        self.timeout = spec.timeout if spec.timeout is not None else DEFAULT_TIMEOUT
        self._context = Context(**{**vars(context), "shared": {}, "timeout": self.timeout})
        self._chunk, self._row_seconds = 1, 0.0
        self._lanes: list[Lane] = []
        self._killed: list[Lane] = []
        """Those that nobody has seen end yet: what fills much memory takes a while to go."""
        self._node = spec.made()
        self._together = max(1, self._node.rows_per_call())
        self._max_lanes = min(MAX_LANES, len(os.sched_getaffinity(0)))
        self._can_kill = can_kill
        if can_kill:
            self._start()
            while not self._lanes[0].ready:
                self._receive(_Work(Batch(Rows(()), {}, {}), 1))
        else:
            self._node.setup(self._context)

    def score(self, inputs: Batch) -> list[Column[Any]]:
        """One column per output of the node; failures are reported.

        A row without a value is null, or left out where `on_error` is `drop`.
        """
        work = _Work(inputs, self._together)
        while not work.is_done:
            if self._can_kill:
                self._send(work)
                self._receive(work)
            else:
                self._score_here(work)
        values = work.values
        if self.spec.on_error != "drop" or None not in values:
            return self._columns(inputs.rows, values)
        kept = [row for row, value in enumerate(values) if value is not None]
        return self._columns(inputs.rows.take(np.array(kept, dtype=np.int64)), [values[row] for row in kept])

    def close(self) -> None:
        """End the processes."""
        for lane in self._lanes:
            lane.ask_to_end()
        until = time.monotonic() + CLOSE_SECONDS
        for lane in self._lanes:
            lane.wait_for_end(until)
            lane.kill()
        for lane in [*self._lanes, *self._killed]:
            lane.join()
        self._lanes, self._killed = [], []
        if not self._can_kill:
            self._node.close()

    def _columns(self, rows: Rows, values: Values) -> list[Column[Any]]:
        ports = self._node.output_ports
        missing = (None,) * len(ports)
        by_port: Iterable[Sequence[Any]] = zip(*(row or missing for row in values), strict=True)
        by_port = by_port if values else [()] * len(ports)
        pairs = zip(by_port, ports.values(), strict=True)
        return [Sample(rows, as_array(column, port.type.dtype)) for column, port in pairs]

    def _score_here(self, work: _Work) -> None:
        rows, together = work.next(MAX_CHUNK)
        batch = work.take(rows)
        if together:
            try:
                work.settle(rows, *score_together(self._node, self.spec.reads, batch))
            except KeyboardInterrupt:
                raise
            except BaseException:  # each row says by itself what is wrong with it
                work.put_back(rows)
        else:
            work.settle(rows, *score_alone(self._node, self.spec.reads, batch))

    def _start(self) -> None:
        self._lanes.append(Lane(self.spec, self._context))

    def _send(self, work: _Work) -> None:
        """Give every idle process some rows, and start another where there is much to do."""
        for lane in self._lanes:
            if lane.ready and not lane.rows and (work.num_waiting if lane is self._lanes[0] else work.num_for_any):
                rows, together = work.next(self._chunk)
                lane.send(work.take(rows), rows, together)
        busy = all(lane.rows for lane in self._lanes)  # one that is being started has none
        slowest = max([self._row_seconds, *(lane.seconds for lane in self._lanes if lane.rows and not lane.together)])
        worth = not self._lanes or slowest * work.num_for_any > START_SECONDS
        if busy and worth and len(self._lanes) < self._max_lanes:
            self._start()

    def _receive(self, work: _Work) -> None:
        """Wait for an answer, an end, or the time limit of a row."""
        left = [self._limit(lane) - lane.seconds for lane in self._lanes if lane.rows]
        wait([sign for lane in self._lanes for sign in lane.signs], max(0.01, min([LOOK_SECONDS, *left])))
        for lane in list(self._lanes):
            if wait(lane.signs, 0):
                self._hear(lane, work)
            elif lane.rows and lane.seconds > self._limit(lane) and (lane.together or lane.position >= 0):
                self._lose(lane, work, TimeoutError(f"no answer within {self.timeout:g} s"))

    def _limit(self, lane: Lane) -> float:
        return self.timeout + GRACE_SECONDS * lane.together

    def _hear(self, lane: Lane, work: _Work) -> None:
        """Take what a process has sent, if it still could."""
        try:
            answer = lane.answer()
        except EOFError:
            self._lose(lane, work, RuntimeError(f"the scoring process died ({lane.end()})"))
            return
        if not lane.ready:
            if isinstance(answer, Failure):
                self._drop(lane)
                raise RuntimeError(f"{answer.error}\n{answer.traceback}")
            lane.ready = True
        elif isinstance(answer, Failure):
            work.put_back(lane.rows)  # each row says by itself what is wrong with it
            lane.rows = []
        else:
            assert answer is not None, "a process that is set up answers with values"
            if not lane.together:
                self._row_seconds = max(lane.took, 1e-6) / len(lane.rows)
                self._chunk = max(1, min(MAX_CHUNK, int(CHUNK_SECONDS / self._row_seconds), 4 * self._chunk))
            work.settle(lane.rows, *answer)
            lane.rows = []

    def _lose(self, lane: Lane, work: _Work, error: Exception) -> None:
        """A process is gone, or must go, in the middle of some rows: the one that was running is to blame."""
        rows, position, ready = lane.rows, lane.position, lane.ready
        self._drop(lane)
        if not ready:
            raise RuntimeError(f"it cannot be set up: {error}")
        self._chunk, self._row_seconds = 1, max(self._row_seconds, lane.took)
        if lane.together:
            work.put_back(rows)
        elif rows:
            culprit = rows[max(position, 0)]
            work.fail(culprit, error)
            work.put_back([row for row in rows if row != culprit])

    def _drop(self, lane: Lane) -> None:
        self._lanes.remove(lane)
        self._killed = [*(killed for killed in self._killed if killed.alive), lane]
        lane.kill()


class _Work:
    """The rows of one call, and what has become of them."""

    def __init__(self, inputs: Batch, num_together: int) -> None:
        self._inputs, self._num_together = inputs, num_together
        self._names = inputs.rows.names()
        self.values: Values = [None] * len(self._names)
        self._fresh: deque[int] = deque(range(len(self._names)))
        self._alone: deque[int] = deque()
        """Rows that were part of something that failed."""
        self._num_left = len(self._names)

    @property
    def is_done(self) -> bool:
        """Whether every row has a value or a failure."""
        return not self._num_left

    @property
    def num_waiting(self) -> int:
        """Rows that no process works on."""
        return len(self._fresh) + len(self._alone)

    @property
    def num_for_any(self) -> int:
        """Those that any process may take: a node that works on several rows at once does so in one process only."""
        return len(self._alone) + (len(self._fresh) if self._num_together == 1 else 0)

    def next(self, chunk: int) -> tuple[list[int], bool]:
        """The next rows to score, and whether in one call."""
        queue, together = (self._alone, False) if self._alone else (self._fresh, self._num_together > 1)
        num = min(self._num_together if together else chunk, len(queue))
        return [queue.popleft() for _ in range(num)], together and num > 1

    def take(self, rows: Sequence[int]) -> Batch:
        """Their columns."""
        return take(self._inputs, np.array(rows, dtype=np.int64))

    def settle(self, rows: Sequence[int], values: Values, report: Report) -> None:
        """They have been scored, or have failed by themselves."""
        replay(report)
        for row, value in zip(rows, values, strict=True):
            self.values[row] = value
        self._num_left -= len(rows)

    def fail(self, row: int, error: Exception) -> None:
        """One has no value."""
        failure([self._names[row]], error)
        self._num_left -= 1

    def put_back(self, rows: Sequence[int]) -> None:
        """They are to be scored again, each alone."""
        self._alone.extend(rows)
