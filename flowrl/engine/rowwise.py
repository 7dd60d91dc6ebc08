"""Running a node on the rows of a batch: each alone, or several in one call; what fails is a value, never a score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from flowrl.batch import Batch, Sample
from flowrl.column import Column
from flowrl.engine.signals import Signals
from flowrl.fields import Port
from flowrl.join import singles
from flowrl.metrics import Report, collect, failure_of
from flowrl.node import Node

Row = tuple[Any, ...]
"""The values of all outputs of one row."""
Values = list[Row | None]
"""For each row its values, or None."""
Reads = Mapping[str, Sequence[str]]


def arguments(reads: Reads, node: Node, inputs: Batch) -> dict[str, Any]:
    """The columns as arguments of `run`; an optional port that nothing writes is None."""
    given: dict[str, Any] = {}
    for name, port in node.input_ports.items():
        if name not in reads:
            given[name] = None
        else:
            columns = [inputs.columns[field] for field in reads[name]]
            given[name] = columns if port.many else columns[0]
    return given


def score_alone(
    node: Node, reads: Reads, batch: Batch, started: Callable[[int], None] | None = None
) -> tuple[Values, Report]:
    """Run the node on each row; an exception leaves the row without a value. `started` hears which row begins."""
    values: Values = []
    signals = Signals()
    with collect() as report:
        for position, (name, single) in enumerate(zip(batch.rows.names(), singles(batch), strict=True)):
            if started is not None:
                started(position)
            value: Row | None = None
            try:
                with signals:
                    found = [row for block in _called(node, reads, single) for row in _rows_of(node, block)]
                    if len(found) != 1:
                        port = next(iter(node.output_ports))
                        raise ValueError(f"it wrote {len(found)} values to '{port}' for one row")
                value = found[0][1]
            except BaseException as error:
                # In a process of its own even an interruption is the row's: judges that await others are cancelled.
                if isinstance(error, KeyboardInterrupt) and started is None:
                    raise
                report.failures.append(failure_of([name], error))
            values.append(value)
    return values, report


def score_together(
    node: Node, reads: Reads, batch: Batch, started: Callable[[int], None] | None = None
) -> tuple[Values, Report]:
    """Run the node on all rows in one call, whose blocks may come in any order. Raises what the node raises."""
    found: dict[str, Row] = {}
    with collect() as report, Signals():
        for block in _called(node, reads, batch):
            for name, row in _rows_of(node, block):
                if name in found:
                    raise ValueError(f"it wrote row {name} twice")
                found[name] = row
            if started is not None:
                started(-1)  # a sign of life
    names = batch.rows.names()
    if found.keys() != set(names):
        raise ValueError(f"it was given {len(names)} rows and wrote {len(found)}")
    return [found[name] for name in names], report


def _called(node: Node, reads: Reads, batch: Batch) -> Iterable[Any]:
    """The blocks that a node returns for these rows."""
    out = node.run(**arguments(reads, node, batch))  # type: ignore[attr-defined]
    return out if isinstance(out, Iterator) else [out]


def _rows_of(node: Node, block: Any) -> Iterator[tuple[str, Row]]:
    """Name and values of each row of a block, in a form that can go to another process."""
    ports = tuple(node.output_ports.values())
    if not isinstance(block, tuple) or len(block) != len(ports):
        raise TypeError(f"it returned {type(block).__name__}, not its Out")
    columns = [_values(port, column) for port, column in zip(ports, block, strict=True)]
    for port, column in zip(ports, block, strict=True):
        if column.rows != block[0].rows:
            raise ValueError(f"it wrote '{port.name}' for other rows than its first output")
    return zip(block[0].rows.names(), zip(*columns, strict=True), strict=True)


def _values(port: Port, column: Column[Any]) -> list[Any]:
    if not isinstance(column, Sample):
        raise TypeError(f"it wrote '{port.name}' as {type(column).__name__}, not as {port.type}")
    values: list[Any] = column.cast(port.type.dtype).values.tolist()
    for value in values:
        if port.type.dtype == "float" and math.isinf(value):
            raise ValueError(f"it wrote {value} to '{port.name}', and infinity is no score")
    return values
