"""Identity of trajectories, and jagged arrays: the two building blocks of a batch.

A trajectory is known by `uid` (its prompt group), `session` (0 to n-1) and `output` (0 to ... within a session);
it is shown as `u17_0_0`. Joins are by identity, never by position; groups are by uid, never by stride.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]
Array = NDArray[Any]


class Rows:
    """Identity of N trajectories in G groups; immutable.

    `uids` holds the G distinct group ids; `group[i]` is the position in it of trajectory i. `planned` and `settled`
    count, per group, the sessions that were asked for and those that have ended, well or badly. A batch of prompts
    without trajectories has G groups and N = 0.
    """

    __slots__ = ("group", "output", "planned", "session", "settled", "uids")

    def __init__(
        self,
        uids: Sequence[str],
        group: Array | Sequence[int] = (),
        session: Array | Sequence[int] = (),
        output: Array | Sequence[int] | None = None,
        planned: Array | Sequence[int] | None = None,
        settled: Array | Sequence[int] | None = None,
    ) -> None:
        self.uids: tuple[str, ...] = tuple(uids)
        self.group: Array = np.asarray(group, dtype=np.int32)
        self.session: Array = np.asarray(session, dtype=np.int32)
        self.output: Array = np.zeros_like(self.group) if output is None else np.asarray(output, dtype=np.int32)
        sizes = np.bincount(self.group, minlength=len(self.uids)) if planned is None or settled is None else None
        self.planned: Array = np.asarray(sizes if planned is None else planned, dtype=np.int32)
        self.settled: Array = np.asarray(sizes if settled is None else settled, dtype=np.int32)
        assert len(self.group) == len(self.session) == len(self.output), "one session and output per trajectory"
        assert len(self.uids) == len(self.planned) == len(self.settled), "one planned and settled size per group"

    @classmethod
    def of(cls, uid: Iterable[str], session: Sequence[int] | None = None) -> Rows:
        """Rows from one group id per trajectory, in any order; sessions are numbered by appearance unless given."""
        names = list(uid)
        distinct = list(dict.fromkeys(names))
        position = {name: index for index, name in enumerate(distinct)}
        seen: dict[str, int] = dict.fromkeys(distinct, 0)
        numbered = []
        for name in names:
            numbered.append(seen[name])
            seen[name] += 1
        return cls(distinct, [position[name] for name in names], numbered if session is None else session)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def num_groups(self) -> int:
        """G, the number of prompt groups."""
        return len(self.uids)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Rows):
            return NotImplemented
        return self.uids == other.uids and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in ("group", "session", "output")
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Rows({len(self)} trajectories in {self.num_groups} groups)"

    def names(self) -> list[str]:
        """How each trajectory is shown to people, for example `u17_0_0`."""
        triples = zip(self.group.tolist(), self.session.tolist(), self.output.tolist(), strict=True)
        return [f"{self.uids[group]}_{session}_{output}" for group, session, output in triples]

    def keys(self) -> list[tuple[str, int, int]]:
        """(uid, session, output) of each trajectory: what joins are made on."""
        uids = self.uids
        return [
            (uids[g], s, o)
            for g, s, o in zip(self.group.tolist(), self.session.tolist(), self.output.tolist(), strict=True)
        ]

    def group_order(self) -> Ints:
        """Positions that sort the groups by uid."""
        return np.array(sorted(range(self.num_groups), key=self.uids.__getitem__), dtype=np.int64)

    def canonical_order(self) -> Ints:
        """Positions that sort trajectories by identity, so that results never depend on the order of arrival."""
        rank = np.empty(self.num_groups, dtype=np.int64)
        rank[self.group_order()] = np.arange(self.num_groups)
        order: Ints = np.lexsort((self.output, self.session, rank[self.group]))
        return order

    def select(self, groups: Array, index: Array) -> Rows:
        """The trajectories at `index`, in this order, with the groups at `groups`, which must hold all of theirs."""
        position = np.full(self.num_groups, -1, dtype=np.int32)
        position[groups] = np.arange(len(groups), dtype=np.int32)
        return Rows(
            [self.uids[group] for group in groups.tolist()],
            position[self.group[index]],
            self.session[index],
            self.output[index],
            self.planned[groups],
            self.settled[groups],
        )

    def take(self, index: Array) -> Rows:
        """The trajectories at these positions, with the groups that they belong to, in the old order of groups."""
        return self.select(np.unique(self.group[index]), index)

    def take_groups(self, groups: Array) -> tuple[Rows, Ints]:
        """The groups at these positions with all their trajectories, and the positions of those."""
        index = np.flatnonzero(np.isin(self.group, groups))
        return self.select(groups, index), index

    @staticmethod
    def concat(parts: Sequence[Rows]) -> Rows:
        """Rows of several blocks one after the other; a group that lies in two blocks becomes one group."""
        if len(parts) == 1:
            return parts[0]
        uids = list(dict.fromkeys(uid for part in parts for uid in part.uids))
        position = {uid: index for index, uid in enumerate(uids)}
        maps = [np.array([position[uid] for uid in part.uids], dtype=np.int32) for part in parts]
        planned, settled = np.zeros(len(uids), np.int32), np.zeros(len(uids), np.int32)
        for part, place in zip(parts, maps, strict=True):
            planned[place] = np.maximum(planned[place], part.planned)
            settled[place] = np.maximum(settled[place], part.settled)
        group = np.concatenate([place[part.group] for part, place in zip(parts, maps, strict=True)])
        session = np.concatenate([part.session for part in parts])
        output = np.concatenate([part.output for part in parts])
        return Rows(uids, group, session, output, planned, settled)


@dataclass(frozen=True)
class Jagged:
    """Rows of unequal length without padding: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: Array

    @classmethod
    def of(cls, rows: Sequence[Any], dtype: Any = None) -> Jagged:
        """From one array or list per row."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        filled = [array for array in arrays if len(array)]  # an empty list has no type of its own
        values = np.concatenate(filled) if filled else np.zeros(0, dtype=dtype)
        return cls(values, offsets_of([len(array) for array in arrays]))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> Ints:
        """Number of values of each row."""
        lengths: Ints = np.diff(self.offsets)
        return lengths

    @property
    def row(self) -> Ints:
        """The row that each value belongs to."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def take(self, index: Array) -> Jagged:
        """The rows at these positions, copied."""
        lengths = self.lengths[index]
        offsets = offsets_of(lengths)
        source = np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Jagged(self.values[source], offsets)

    def padded(self, fill: float = 0) -> Array:
        """(rows, longest row) array, filled at the end of shorter rows: for kernels that need a rectangle."""
        lengths = self.lengths
        width = int(lengths.max(initial=0))
        out = np.full((len(self), width), fill, dtype=self.values.dtype)
        out[np.arange(width) < lengths[:, None]] = self.values[self.offsets[0] : self.offsets[-1]]
        return out

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """All rows of the parts, in order."""
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate([part.values[part.offsets[0] : part.offsets[-1]] for part in parts])
        return Jagged(values, offsets_of(np.concatenate([part.lengths for part in parts])))


def offsets_of(lengths: Array | Sequence[int]) -> Ints:
    """Offsets of rows with these lengths: one more than there are rows, starting at 0."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
