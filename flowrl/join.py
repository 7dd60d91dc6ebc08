"""Putting batches together and taking them apart, by identity: concat, join, take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from flowrl.batch import Batch, Prompt, PromptToken, Sample, Step, Token
from flowrl.column import Column, as_array
from flowrl.rows import Array, Jagged, Rows


def take(batch: Batch, index: Array) -> Batch:
    """The trajectories at these positions; groups without any of them are left out."""
    groups = np.unique(batch.rows.group[index])
    return _selected(batch, batch.rows.select(groups, index), groups, index)


def _selected(batch: Batch, rows: Rows, groups: Array, index: Array) -> Batch:
    """The trajectories at `index` and the groups at `groups`, both in this order, which are `rows`."""
    return Batch(rows, {n: _taken(c, rows, index, groups) for n, c in batch.columns.items()}, batch.types)


def singles(batch: Batch) -> Iterator[Batch]:
    """One batch for each trajectory, as views; the same as `take` for each position, without its cost."""
    rows, first = batch.rows, np.zeros(1, dtype=np.int32)
    for row, group in enumerate(rows.group.tolist()):
        here, there = slice(row, row + 1), slice(group, group + 1)
        single = Rows(
            rows.uids[there], first, rows.session[here], rows.output[here], rows.planned[there], rows.settled[there]
        )
        yield Batch(single, {n: _single(c, single, row, group) for n, c in batch.columns.items()}, batch.types)


def _single(column: Column[Any], rows: Rows, row: int, group: int) -> Column[Any]:
    if isinstance(column, Sample):
        return Sample(rows, column.values[row : row + 1])
    if isinstance(column, Prompt):
        return Prompt(rows, column.values[group : group + 1])
    return _taken(column, rows, np.array([row]), np.array([group]))


def take_groups(batch: Batch, uids: Iterable[str]) -> Batch:
    """The groups with these uids that the batch has, with all their trajectories."""
    wanted = set(uids)
    if wanted.issuperset(batch.rows.uids):
        return batch
    groups = np.array([g for g, uid in enumerate(batch.rows.uids) if uid in wanted], dtype=np.int64)
    rows, index = batch.rows.take_groups(groups)
    return _selected(batch, rows, groups, index)


def project(batch: Batch, fields: Iterable[str]) -> Batch:
    """Only these fields."""
    kept = [name for name in fields if name in batch.columns]
    return Batch(batch.rows, {n: batch.columns[n] for n in kept}, {n: batch.types[n] for n in kept})


def canonical(batch: Batch) -> Batch:
    """The same groups and trajectories, both sorted by identity."""
    groups, order = batch.rows.group_order(), batch.rows.canonical_order()
    if np.array_equal(groups, np.arange(len(groups))) and np.array_equal(order, np.arange(len(order))):
        return batch
    return _selected(batch, batch.rows.select(groups, order), groups, order)


def concat(parts: Sequence[Batch]) -> Batch:
    """Blocks of the same fields one after the other."""
    if len(parts) == 1:
        return parts[0]
    rows = Rows.concat([part.rows for part in parts])
    columns = {name: _joined([part.columns[name] for part in parts], rows) for name in parts[0].columns}
    return Batch(rows, columns, parts[0].types)


def join(parts: Sequence[Batch]) -> Batch:
    """Batches of different fields side by side, matched by identity.

    Parts with equal fields are blocks of one writer and are concatenated first. A trajectory that any part lacks, or
    for whose group a part with `Prompt` columns has no value, is left out of all.
    """
    by_fields: dict[tuple[str, ...], list[Batch]] = {}
    for part in parts:
        by_fields.setdefault(tuple(sorted(part.columns)), []).append(part)
    blocks = [concat(same) for same in by_fields.values()]
    with_samples = [block for block in blocks if _has_samples(block)]
    if not with_samples:
        return _join_groups(blocks[0], blocks[1:])
    keys = [block.rows.keys() for block in with_samples]
    common = set(keys[0]).intersection(*map(set, keys[1:]))
    base = with_samples[0]
    if len(common) < len(keys[0]):
        kept = [position for position, key in enumerate(keys[0]) if key in common]
        base = take(base, np.array(kept, dtype=np.int64))
    columns, types = dict(base.columns), dict(base.types)
    wanted = base.rows.keys()
    for block, names in zip(with_samples[1:], keys[1:], strict=True):
        position = {key: index for index, key in enumerate(names)}
        index = np.array([position[key] for key in wanted], dtype=np.int64)
        columns |= {name: _aligned(column, base.rows, index) for name, column in block.columns.items()}
        types |= block.types
    prompts_only = [block for block in blocks if not _has_samples(block)]
    return _join_groups(Batch(base.rows, columns, types), prompts_only)


def with_groups(batch: Batch, parts: Iterable[Batch], uids: Iterable[str], planned: int) -> Batch:
    """The batch with those of these groups that it lacks, without trajectories; so many were planned for each.

    A `Prompt` column takes their values from the parts; a group for which one has none stays away.
    """
    values: dict[str, dict[str, Any]] = {n: {} for n, c in batch.columns.items() if isinstance(c, Prompt)}
    for part in parts:
        for name in values.keys() & part.columns.keys():
            values[name] |= zip(part.rows.uids, part.columns[name].values, strict=True)
    lost = [uid for uid in uids if uid not in set(batch.rows.uids) and all(uid in known for known in values.values())]
    old, every = batch.rows, [*batch.rows.uids, *lost]
    sizes = [planned] * len(every)
    rows = Rows(every, old.group, old.session, old.output, planned=sizes, settled=sizes)
    where, nothing = np.arange(len(old)), np.zeros(0, np.int64)
    columns = {name: _taken(c, rows, where, nothing) for name, c in batch.columns.items() if name not in values}
    for name, known in values.items():
        columns[name] = Prompt(rows, as_array([known[uid] for uid in every], batch.types[name].dtype))
    return Batch(rows, {name: columns[name] for name in batch.columns}, batch.types)


def _has_samples(batch: Batch) -> bool:
    return any(column.axis in ("Sample", "Token", "PromptToken") for column in batch.columns.values())


def _join_groups(base: Batch, others: Sequence[Batch]) -> Batch:
    """Add `Prompt` and `Step` columns of other blocks to the groups of `base` that all have a value for."""
    for other in others:
        if any(isinstance(column, Prompt) for column in other.columns.values()):
            base = take_groups(base, other.rows.uids)
    columns, types = dict(base.columns), dict(base.types)
    for other in others:
        columns |= {name: _aligned(column, base.rows, np.zeros(0, np.int64)) for name, column in other.columns.items()}
        types |= other.types
    return Batch(base.rows, columns, types)


def _group_index(rows: Rows, target: Rows) -> Array:
    position = {uid: index for index, uid in enumerate(rows.uids)}
    return np.array([position[uid] for uid in target.uids], dtype=np.int64)


def _aligned(column: Column[Any], rows: Rows, index: Array) -> Column[Any]:
    if isinstance(column, Prompt):
        return Prompt(rows, column.values[_group_index(column.rows, rows)])
    return _taken(column, rows, index, np.zeros(0, np.int64))


def _taken(column: Column[Any], rows: Rows, index: Array, groups: Array) -> Column[Any]:
    if isinstance(column, Step):
        return Step(rows, column.values[0])
    if isinstance(column, Prompt):
        return Prompt(rows, column.values[groups])
    if isinstance(column, Token):
        jagged = column.jagged.take(index)
        return Token(rows, jagged.values, jagged.offsets)
    if isinstance(column, PromptToken):
        used, where = np.unique(column.index[index], return_inverse=True)
        jagged = column.distinct.take(used)
        return PromptToken(rows, jagged.values, jagged.offsets, where.astype(np.int32))
    return Sample(rows, column.values[index])


def _joined(columns: Sequence[Column[Any]], rows: Rows) -> Column[Any]:
    first = columns[0]
    if isinstance(first, Step):
        return Step(rows, first.values[0])
    if isinstance(first, Prompt):
        position = {uid: index for index, uid in enumerate(uid for column in columns for uid in column.rows.uids)}
        values = np.concatenate([column.values for column in columns])
        return Prompt(rows, values[[position[uid] for uid in rows.uids]])
    if isinstance(first, Token):
        jagged = Jagged.concat([column.jagged for column in columns if isinstance(column, Token)])
        return Token(rows, jagged.values, jagged.offsets)
    if isinstance(first, PromptToken):
        parts = [column for column in columns if isinstance(column, PromptToken)]
        jagged = Jagged.concat([part.distinct for part in parts])
        starts = np.cumsum([0] + [len(part.distinct) for part in parts[:-1]])
        index = np.concatenate([part.index + start for part, start in zip(parts, starts, strict=True)])
        return PromptToken(rows, jagged.values, jagged.offsets, index.astype(np.int32))
    return Sample(rows, np.concatenate([column.values for column in columns]))
