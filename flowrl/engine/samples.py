"""Samples for people: a few trajectories of every so many-th step, as a table.

In such a step each call that works on the chosen groups returns one small object more: its values per sample, and the
lengths of what it generated. They are read back while the next step runs. Other steps cost nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from flowrl.batch import Batch, PromptToken, Sample, Token
from flowrl.encode import dumps, plain
from flowrl.fields import Dtype, FieldType
from flowrl.join import take_groups
from flowrl.rows import Array
from flowrl.schedule.record import Recorder, Samples

if TYPE_CHECKING:  # a worker needs none of them
    from flowrl.engine.cluster import Cluster
    from flowrl.graph.bind import BoundNode
    from flowrl.graph.plan import Plan

Key = tuple[str, int, int]
"""uid, session and output of a trajectory."""
LENGTHS = ("prompt_length", "response_length")
"""In tokens, those of tools included, whatever a mask leaves out."""
CLOSE_SECONDS = 5.0
"""Longest wait at the end of a run for what is still being read."""


@dataclass(frozen=True)
class Values:
    """What one block of a node says of the chosen trajectories, in native types."""

    keys: Sequence[Key]
    columns: Mapping[str, Sequence[Any]]
    lengths: Mapping[str, Sequence[int]]


def sampled(block: Batch, uids: Iterable[str], expands: bool) -> Values:
    """The values per sample of these groups; of a node that makes trajectories also their lengths."""
    part = take_groups(block, uids)
    columns = part.columns.items()
    values = {name: native(column.values, part.types[name]) for name, column in columns if isinstance(column, Sample)}
    lengths: dict[str, Sequence[int]] = {}
    for _, column in columns if expands else ():
        if isinstance(column, PromptToken | Token):
            lengths.setdefault(LENGTHS[isinstance(column, Token)], column.lengths.tolist())
    return Values(part.rows.keys(), values, lengths)


def native(values: Array, type_: FieldType) -> list[Any]:
    """The values without numpy: NaN is None, json is text, and what UTF-8 has no form for is replaced."""
    if type_.dtype == "float":
        return [None if np.isnan(value) else float(value) for value in values]
    if type_.dtype == "json":
        return [value if value is None or isinstance(value, str) else dumps(value) for value in map(plain, values)]
    return [plain(value) for value in values.tolist()]


def stored(type_: FieldType) -> Dtype:
    """The type of a field's column in the table."""
    return "str" if type_.dtype == "json" else type_.dtype


class Sampler:
    """Chooses the groups of a step, collects what is said of them, and hands the table to the recorder."""

    def __init__(self, plan: Plan, cluster: Cluster, recorder: Recorder) -> None:
        self._spec, self._group = plan.document.run.samples, plan.document.batch.group
        self._cluster, self._recorder = cluster, recorder
        fields = (field for name in plan.graph.order for field in plan.writes(plan.graph.nodes[name]))
        self._types = {field.name: stored(field.type) for field in fields if field.type.axis == "Sample"}
        self._prompts: Batch | None = None
        self._step = 0
        self._left: set[str] = set()
        """The chosen groups that are still in flight."""
        self._refs: list[Any] = []
        self._reading: set[asyncio.Task[None]] = set()

    def begin(self, step: int, prompts: Batch) -> None:
        """Choose the first groups of a step that is to have a table, unless those of another are still in flight."""
        wanted = step == 1 or step % self._spec.every == 0
        if not wanted or self._left or self._step == step:
            return
        self._step, self._refs = step, []
        self._left = set(prompts.rows.uids[: -(-self._spec.rows // self._group)])
        self._prompts = take_groups(prompts, [uid for uid in prompts.rows.uids if uid in self._left])

    def asked_of(self, node: BoundNode, uids: Iterable[str]) -> tuple[str, ...]:
        """The chosen groups among these, if the node has anything to say of them."""
        speaks = any(port.type.axis == "Sample" for port in node.cls.output_ports.values())
        return tuple(uid for uid in uids if uid in self._left) if speaks and self._left else ()

    def add(self, ref: Any) -> None:
        """An object that such a call has returned."""
        self._refs.append(ref)

    def leave(self, uids: Iterable[str]) -> None:
        """Groups are trained or given up: with the last chosen one the objects are read back, beside the run."""
        open_before, self._left = bool(self._left), self._left.difference(uids)
        if open_before and not self._left:
            self._read()

    def _read(self) -> None:
        if self._refs and self._prompts is not None:
            task = asyncio.ensure_future(self._record(self._step, self._prompts, self._refs))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
        self._left, self._refs = set(), []

    async def _record(self, step: int, prompts: Batch, refs: Sequence[Any]) -> None:
        try:
            parts = await asyncio.to_thread(self._cluster.fetch, refs)
            self._recorder.samples(table(step, prompts, parts, self._types))
        except Exception as error:  # people can do without; training goes on
            self._recorder.note(f"step {step}: no table of samples: {type(error).__name__}: {error}", "warning")

    async def close(self) -> None:
        """Wait for what is still being read."""
        self._read()
        if self._reading:
            await asyncio.wait(self._reading, timeout=CLOSE_SECONDS)


def table(step: int, prompts: Batch, parts: Sequence[Values], types: Mapping[str, Dtype]) -> Samples:
    """One row for each trajectory, by prompt in the order of the data, then by session and output.

    A value that a node did not write is None. A field that is called like a column of our own is `field_<name>`.
    """
    place = {uid: index for index, uid in enumerate(prompts.rows.uids)}
    keys = sorted({key for part in parts for key in part.keys}, key=lambda key: (place[key[0]], *key[1:]))
    uids = [uid for uid, _, _ in keys]
    sessions, outputs = [session for _, session, _ in keys], [output for _, _, output in keys]
    columns: dict[str, list[Any]] = {"step": [step] * len(keys), "uid": uids, "session": sessions, "output": outputs}
    shown: dict[str, Dtype] = {"step": "int", "uid": "str", "session": "int", "output": "int"}
    own = {*columns, *LENGTHS}

    def add(name: str, dtype: Dtype, values: list[Any]) -> None:
        columns[name], shown[name] = values, dtype

    def written(kind: Literal["columns", "lengths"], name: str) -> list[Any]:
        found: dict[Key, Any] = {}
        for part in parts:
            found.update(zip(part.keys, getattr(part, kind).get(name, ()), strict=False))
        return [found.get(key) for key in keys]

    for name, column in prompts.columns.items():
        values = native(column.values, prompts.types[name])
        add(free(name, own), stored(prompts.types[name]), [values[place[uid]] for uid in uids])
    for name, dtype in types.items():
        add(free(name, own), dtype, written("columns", name))
    for name in LENGTHS:
        add(name, "int", written("lengths", name))
    return Samples(step, columns, shown)


def free(name: str, own: Collection[str]) -> str:
    """What the column of a field is called."""
    return f"field_{name}" if name in own else name
