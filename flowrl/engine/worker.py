"""A pool worker: holds its nodes and their models, and turns a call with input batches into receipts and outputs.

The same class runs inside a Ray actor and, with `--local`, inside the driver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flowrl.batch import COLUMN_CLASSES, Batch, Token
from flowrl.column import Column
from flowrl.engine.call import Call, NodeSetup, Receipt, WorkerSetup
from flowrl.engine.rowwise import arguments
from flowrl.engine.samples import sampled
from flowrl.engine.scorer import Scorer
from flowrl.engine.states import States
from flowrl.evaluation import Evaluation
from flowrl.fields import FieldType
from flowrl.join import canonical, concat, join, project, take_groups, with_groups
from flowrl.metrics import Report, collect, failure_of
from flowrl.node import CYCLE, Context, Node
from flowrl.rows import Rows

Block = tuple[Receipt, list[Any]]
EARLY_BLOCK_SECONDS = 0.05
"""A finished group waits at most so long for others to fill its block."""


class Worker:
    """All nodes of one pool on one worker. Calls run one at a time, beside any number of those that serve."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.shared: dict[Any, Any] = {}
        self.nodes: dict[str, Node] = {}
        self.scorers: dict[str, Scorer] = {}
        self.by_name = {node.name: node for node in setup.nodes}
        self.asleep = False
        """Whether the engines have left the device to what trains."""
        self._device = threading.Lock()
        self.states = States(setup, self.nodes, self.scorers)

    def load(self) -> None:
        """Make every node and let it load what it needs."""
        for spec in self.setup.nodes:
            node = spec.made()
            if node.scores_alone(spec.on_error):
                self.scorers[spec.name] = Scorer(spec, self.context(spec), self.setup.can_kill)
            else:
                node.setup(self.context(spec))
            self.nodes[spec.name] = node

    def context(self, spec: NodeSetup) -> Context:
        """What the node may know of its worker."""
        setup = self.setup
        return Context(
            spec.name, spec.model, setup.models, setup.rank, setup.num_ranks, setup.device, setup.seed,
            setup.num_threads, self.shared, spec.reads, spec.timeout, setup.trained, setup.optimizer_steps,
            setup.updates_per_sync,
        )  # fmt: skip

    def close(self) -> None:
        """End the processes that this worker and its nodes started."""
        for scorer in self.scorers.values():
            scorer.close()
        for node in self.nodes.values():
            node.close()

    def blocks(self, call: Call, parts: Sequence[Batch]) -> Iterator[Block]:
        """Run the node; a receipt and the output objects for each block. What the node raises becomes a failure."""
        spec, left = self.by_name[call.node], dict.fromkeys(call.uids)
        start, num_bytes = time.time(), sum(_num_bytes(part) for part in parts)
        produced = self._produce(spec, call, parts)
        pending, report, last = list[Batch](), Report(), False
        while not last:
            out, last = self._next(spec, produced, report)
            pending += [out] if out is not None else []
            settled = [uid for part in pending for uid in part.rows.uids]
            # When nothing is left the end comes at once: wait for it instead of sending an empty block after this one.
            if not last and (len(settled) == len(left) or not block_is_full(call, len(settled), time.time() - start)):
                continue
            done = tuple(left) if last else tuple(settled)
            for uid in done:
                left.pop(uid, None)
            yield self._block(spec, call, pending, done, (start, num_bytes), report, last)
            pending, report, start, num_bytes = [], Report(), time.time(), 0

    def _next(self, spec: NodeSetup, produced: Iterator[Batch], report: Report) -> tuple[Batch | None, bool]:
        """The next output and whether there are no more; adds to the report what the node has reported."""
        with collect(report):
            try:
                out = next(produced, None)
            except Exception as error:
                report.failures.append(failure_of((), error))
                report.failed, out = True, None
        if report.failures and spec.on_error in ("fail", "retry"):
            report.failed, out = True, None  # what failed is not to be left out
        return out, out is None

    def pause(self) -> None:
        """Stop the engines between two tokens, their requests kept, and let what trains have the device."""
        self._lend_device(asleep=True)

    def resume(self) -> None:
        """Give the device back to the engines: kept requests go on, under the weights of the last sync."""
        self._lend_device(asleep=False)

    def abort(self, node: str, uids: Sequence[str]) -> None:
        """End the sessions of these groups that a node is generating."""
        self.nodes[node].abort(uids)

    def receiver(self, node: str) -> Any:
        """What a sync node says to those that send weights to this worker."""
        return self._sync_node(node).receiver()

    def send(self, node: str, receivers: Sequence[Any]) -> Iterator[Any]:
        """Weights for the engines, part by part, from a sync node."""
        return iter(self._sync_node(node).send(receivers))

    def receive(self, node: str, part: Any, version: int) -> None:
        """Load a part of the weights into the engines of this worker."""
        self._sync_node(node).receive(part, version)

    def restore(self, folder: str) -> None:
        """Take back what a checkpoint holds; engines leave the device's memory to it."""
        for node in self.nodes.values():
            if node.weights == "updates":
                self._share_device(node)
        self.states.restore(folder)

    def _sync_node(self, name: str) -> Any:
        return self.nodes[name]

    def _produce(self, spec: NodeSetup, call: Call, parts: Sequence[Batch]) -> Iterator[Batch]:
        """The outputs of a call as they come; none where every trajectory of its groups was dropped on the way."""
        inputs, node = canonical(self._inputs(spec, call, parts)), self._node(spec, call)
        missing = [field for field in spec.fields_read if field not in inputs.columns]
        axes = {node.input_ports[port].type.axis for port in spec.reads}
        if (
            axes & {"Sample", "Token", "PromptToken"}
            and node.weights != "updates"
            and (missing or not len(inputs.rows))
        ):
            return
        if missing:
            raise LookupError(f"{spec.name} reads '{missing[0]}', of which nothing has arrived for these groups")
        if spec.name in self.scorers:
            yield self._output(spec, self.scorers[spec.name].score(inputs), inputs.rows)
            return
        if not call.serves:
            self._share_device(node)
        if node.weights in ("reads", "updates"):  # these run one at a time
            self.shared[CYCLE] = call.step if call.asked is None else None
        result = node.run(**arguments(spec.reads, node, inputs))  # type: ignore[attr-defined]
        for out in result if isinstance(result, Iterator) else [result]:
            yield self._output(spec, out, inputs.rows)

    def _share_device(self, node: Node) -> None:
        """Nodes that generate and nodes that otherwise compute with models take turns with the device's memory."""
        if node.weights is not None:
            self._lend_device(asleep=node.weights != "generates")

    def _lend_device(self, *, asleep: bool) -> None:
        """Let the engines sleep and what otherwise computes with models wake, or the other way round."""
        with self._device:
            if asleep == self.asleep:
                return
            holders = [other for other in self.nodes.values() if other.weights in ("generates", "reads", "updates")]
            for other in holders:
                if (other.weights == "generates") == asleep:
                    other.sleep()
            for other in holders:
                if (other.weights == "generates") != asleep:
                    other.wake()
            self.asleep = asleep

    def _node(self, spec: NodeSetup, call: Call) -> Node:
        """The node; for a validation, one that generates has the settings that are asked for."""
        node = self.nodes[spec.name]
        if call.asked is None or not call.asked.settings or node.weights != "generates":
            return node
        # The copy shares all that the node holds: its engine too.
        return node.model_copy(update=dict(call.asked.settings))

    def _inputs(self, spec: NodeSetup, call: Call, parts: Sequence[Batch]) -> Batch:
        chosen = [take_groups(project(part, spec.fields_read), call.uids) for part in parts]
        filled = [part for part in chosen if part.columns]
        inputs = join(filled) if filled else Batch(Rows(call.uids), {}, {})
        if call.asked is not None and isinstance(self.nodes[spec.name], Evaluation):
            return with_groups(inputs, filled, call.uids, call.asked.samples)
        return inputs

    def _output(self, spec: NodeSetup, out: Any, inputs: Rows) -> Batch:
        """`Out` as a batch of fields, checked against what the node declares."""
        ports, rows = self.nodes[spec.name].output_ports, inputs
        values = [] if out is None else list(out)
        if values and isinstance(values[0], Rows):
            rows = values.pop(0)
        elif values:
            rows = values[0].rows if isinstance(values[0], Column) else rows
        if len(values) != len(ports):
            raise TypeError(f"{spec.name} returned {len(values)} outputs, its Out has {len(ports)}")
        columns: dict[str, Column[Any]] = {}
        types: dict[str, FieldType] = {}
        for port, column in zip(ports.values(), values, strict=True):
            if type(column) is not COLUMN_CLASSES[port.type.axis]:
                raise TypeError(f"{spec.name} wrote '{port.name}' as {type(column).__name__}, not as {port.type}")
            if column.rows != rows:
                raise ValueError(f"{spec.name} wrote '{port.name}' for other rows than its first output")
            field = spec.writes[port.name]
            try:
                columns[field], types[field] = column.cast(port.type.dtype), port.type
            except (TypeError, ValueError) as error:
                raise TypeError(f"{spec.name} wrote '{port.name}', which is no {port.type}: {error}") from error
            if self.setup.strict_io:
                check_values(spec.name, port.name, columns[field], port.type)
        check_rows(self.nodes[spec.name], spec, rows, inputs)
        return Batch(rows, columns, types)

    def _block(
        self, spec: NodeSetup, call: Call, pending: list[Batch], settled: tuple[str, ...],
        before: tuple[float, int], report: Report, last: bool,
    ) -> Block:  # fmt: skip
        whole = concat(pending) if pending else None
        outputs = [project(whole, fields) for fields in spec.outputs] if whole is not None else []
        num_bytes, node = sum(map(_num_bytes, outputs)), self.nodes[spec.name]
        fields = spec.outputs if whole is not None else ()
        returned: list[Any] = [*outputs]
        if call.samples and whole is not None:
            returned.append(sampled(whole, call.samples, node.cardinality == "expands"))
        start, bytes_in = before
        receipt = Receipt(
            call.node, call.step, call.attempt, self.setup.name, whole.rows if whole is not None else Rows(()), settled,
            start, time.time(), bytes_in, num_bytes,
            tuple(report.metrics.values()), tuple(report.failures), report.failed, last,
            node.changed(), fields, len(returned) > len(outputs),
            *(ages_and_lengths(spec, whole) if node.weights == "generates" and whole is not None else ()),
        )  # fmt: skip
        return receipt, returned


def ages_and_lengths(spec: NodeSetup, block: Batch) -> tuple[dict[str, int], dict[str, int]]:
    """Of each group the smallest version that made a token of it, where the node says which did, and its longest
    response in tokens.
    """
    uids, group = block.rows.uids, block.rows.group
    none = np.iinfo(np.int64).max
    oldest, longest = np.full(len(uids), none), np.zeros(len(uids), dtype=np.int64)
    versions = block.columns.get(spec.writes.get("policy_version", ""))
    if isinstance(versions, Token):
        np.minimum.at(oldest, group[versions.jagged.row], versions.values)
    for column in block.columns.values():
        if isinstance(column, Token):
            np.maximum.at(longest, group, column.lengths)
    return (
        {uid: int(version) for uid, version in zip(uids, oldest, strict=True) if version < none},
        {uid: int(length) for uid, length in zip(uids, longest, strict=True) if length},
    )


def check_rows(node: Node, spec: NodeSetup, rows: Rows, inputs: Rows) -> None:
    """A node writes for the rows that it was given; rows that vanish would take their signal with them.

    All of them, or a part where it filters or where each rank has its own; only one that expands makes new ones.
    """
    if node.cardinality == "expands" or rows == inputs:
        return
    written, given = sorted(rows.names()), sorted(inputs.names())
    if strange := set(written) - set(given):
        raise ValueError(f"{spec.name} wrote rows that it was not given, such as {min(strange)}")
    some = node.cardinality == "filters" or node.weights is not None or spec.on_error == "drop"
    if not some and written != given:
        raise ValueError(f"{spec.name} was given {len(given)} rows and wrote {len(written)}")


def check_values(node: str, port: str, column: Column[Any], type_: FieldType) -> None:
    """The checks of `run.strict_io`: finite floats, or NaN where a value may be missing; offsets that never fall."""
    if type_.dtype == "float" and not (np.isfinite(column.values) | (type_.nullable & np.isnan(column.values))).all():
        raise ValueError(f"{node} wrote a value that is not finite to '{port}'")
    if hasattr(column, "offsets") and (np.diff(column.offsets) < 0).any():
        raise ValueError(f"{node} wrote offsets that fall to '{port}'")


def block_is_full(call: Call, num_settled: int, seconds: float) -> bool:
    """Whether a stream sends what has settled in so many seconds, while there is more to come."""
    if call.block_groups is None or not num_settled:
        return False
    return num_settled >= call.block_groups or seconds >= EARLY_BLOCK_SECONDS


def _num_bytes(batch: Batch) -> int:
    return sum(int(column.values.nbytes) for column in batch.columns.values())
