"""Scoring rows one by one in a process that can be killed: one bad row hurts no other.

A row that raises, or takes longer than `timeout`, stays without a value and is reported with its name. Rows are sent in
chunks that take about a tenth of a second, so that a killed process costs no more work than that.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.batch import Batch, Sample
from flowrl.column import Column, as_array
from flowrl.engine.call import NodeSetup
from flowrl.fields import Port
from flowrl.join import singles, take
from flowrl.metrics import Report, collect, failure, failure_of, replay
from flowrl.node import Context, Node
from flowrl.rows import Rows

if TYPE_CHECKING:
    from pebble import ProcessPool

DEFAULT_TIMEOUT = 30.0
CHUNK_SECONDS = 0.1
MAX_CHUNK = 4096

Values = list[tuple[Any, ...] | None]
"""For each row the values of all outputs, or None."""


class Scorer:
    """Runs one node row by row, outside the worker's own process when it may be killed."""

    def __init__(self, spec: NodeSetup, context: Context, can_kill: bool) -> None:
        self.spec, self.can_kill = spec, can_kill
        self.timeout = spec.timeout if spec.timeout is not None else DEFAULT_TIMEOUT
        self._context = Context(**{**vars(context), "shared": {}})
        self._chunk = 1
        self._pool: ProcessPool | None = None
        self._node: Node | None = None
        if can_kill:
            self._start()
        else:
            self._node = spec.made()
            self._node.setup(self._context)

    def score(self, inputs: Batch) -> list[Column[Any]]:
        """One column per output of the node; failures are reported.

        A row without a value is null, or left out where `on_error` is `drop`.
        """
        num_rows = len(inputs.rows)
        values: Values = [None] * num_rows
        todo = list(range(num_rows))
        while todo:
            chunk, todo = todo[: self._chunk], todo[self._chunk :]
            started = time.monotonic()
            done, report, lost = self._run(take(inputs, np.array(chunk, dtype=np.int64)))
            replay(report)
            if lost is not None:
                position, error = lost
                self._chunk, todo = 1, [row for row in chunk if row != chunk[position]] + todo
                failure([inputs.rows.names()[chunk[position]]], error)
                continue
            for row, value in zip(chunk, done, strict=True):
                values[row] = value
            per_row = max(time.monotonic() - started, 1e-6) / len(chunk)
            self._chunk = max(1, min(MAX_CHUNK, int(CHUNK_SECONDS / per_row), 4 * self._chunk))
        if self.spec.on_error != "drop" or None not in values:
            return self._columns(inputs.rows, values)
        kept = [row for row, value in enumerate(values) if value is not None]
        return self._columns(inputs.rows.take(np.array(kept, dtype=np.int64)), [values[row] for row in kept])

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            pool: Any = self._pool  # pebble has no type hints
            pool.stop()
            pool.join()

    def _columns(self, rows: Rows, values: Values) -> list[Column[Any]]:
        ports = self.spec.ref.load().output_ports
        missing = (None,) * len(ports)
        by_port = (
            zip(*(row if row is not None else missing for row in values), strict=True) if values else [()] * len(ports)
        )
        pairs = zip(by_port, ports.values(), strict=True)
        return [Sample(rows, as_array(column, port.type.dtype)) for column, port in pairs]

    def _run(self, batch: Batch) -> tuple[Values, Report, tuple[int, Exception] | None]:
        """Values of the rows and what was reported; or the position of the row that cost the process, and why."""
        if self._node is not None:
            return *score_rows(self._node, self.spec.reads, batch), None
        from pebble import ProcessExpired

        assert self._pool is not None
        self._row.value, self._since.value = -1, time.time()
        future: Any = self._pool.schedule(_score_in_child, args=(batch,))
        while True:
            try:
                return *future.result(timeout=min(self.timeout, 0.5)), None
            except FutureTimeoutError:
                if self._row.value >= 0 and time.time() - self._since.value > self.timeout:
                    future.cancel()
                    return [], Report(), (self._row.value, TimeoutError(f"no answer within {self.timeout:g} s"))
            except ProcessExpired as error:
                return [], Report(), (max(self._row.value, 0), RuntimeError(f"the scoring process died: {error}"))

    def _start(self) -> None:
        from pebble import ProcessPool

        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["flowrl.engine.scorer"])
        self._row: Any = context.Value(ctypes.c_long, -1, lock=False)
        self._since: Any = context.Value(ctypes.c_double, 0.0, lock=False)
        self._pool = ProcessPool(
            max_workers=1,
            context=context,
            initializer=_start_child,
            initargs=(self.spec, self._context, self._row, self._since),
        )
        try:
            self._pool.schedule(_ready).result()
        except Exception:
            self.close()
            raise


def arguments(reads: Mapping[str, Sequence[str]], node: Node, inputs: Batch) -> dict[str, Any]:
    """The columns as arguments of `run`; an optional port that nothing writes is None."""
    given: dict[str, Any] = {}
    for name, port in node.input_ports.items():
        if name not in reads:
            given[name] = None
        else:
            columns = [inputs.columns[field] for field in reads[name]]
            given[name] = columns if port.many else columns[0]
    return given


def score_rows(
    node: Node, reads: Mapping[str, Sequence[str]], batch: Batch, started: Any = None
) -> tuple[Values, Report]:
    """Run the node on each row alone; an exception leaves the row without a value."""
    values: Values = []
    with collect() as report:
        for position, (name, single) in enumerate(zip(batch.rows.names(), singles(batch), strict=True)):
            if started is not None:
                started(position)
            try:
                out = node.run(**arguments(reads, node, single))  # type: ignore[attr-defined]
                values.append(_values(node, out))
            except BaseException as error:
                # In a process of its own even an interruption is the row's: judges that await others are cancelled.
                if isinstance(error, KeyboardInterrupt) and started is None:
                    raise
                report.failures.append(failure_of([name], error))
                values.append(None)
    return values, report


def _values(node: Node, out: Any) -> tuple[Any, ...]:
    """The values of one row, from an `Out` or from the blocks of a stream, in a form that can go to another process."""
    blocks = list(out) if isinstance(out, Iterator) else [out]
    ports = tuple(node.output_ports.values())
    for block in blocks:
        if not isinstance(block, tuple) or len(block) != len(ports):
            raise TypeError(f"it returned {type(block).__name__}, not its Out")
    return tuple(_only_value(port, [block[position] for block in blocks]) for position, port in enumerate(ports))


def _only_value(port: Port, columns: Sequence[Column[Any]]) -> Any:
    for column in columns:
        if not isinstance(column, Sample):
            raise TypeError(f"it wrote '{port.name}' as {type(column).__name__}, not as {port.type}")
    values = [value for column in columns for value in column.cast(port.type.dtype).values.tolist()]
    if len(values) != 1:
        raise ValueError(f"it wrote {len(values)} values to '{port.name}' for one row")
    return values[0]


_child: dict[str, Any] = {}
"""State of the scoring process; set once by `_start_child`."""


def _start_child(spec: NodeSetup, context: Context, row: Any, since: Any) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
    _child.update(reads=spec.reads, row=row, since=since)
    try:
        _child["node"] = spec.made()
        _child["node"].setup(context)
    except Exception as error:
        _child["error"] = failure_of((), error)  # pebble would end the process and keep the reason to itself


def _die_with(sentinel: int) -> None:
    """End this process when its parent is gone, so that a killed worker leaves nothing behind."""
    wait([sentinel])
    os._exit(0)


def _ready() -> None:
    if "error" in _child:
        raise RuntimeError(f"{_child['error'].error}\n{_child['error'].traceback}")


def _score_in_child(batch: Batch) -> tuple[Values, Report]:
    _ready()  # a process that took the place of a killed one may have failed to start

    def started(position: int) -> None:
        _child["since"].value = time.time()
        _child["row"].value = position

    return score_rows(_child["node"], _child["reads"], batch, started)
