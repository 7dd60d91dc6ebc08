"""Where the columns of the current steps lie: for each field, references to the objects that hold it.

The driver holds references and identities only. A field of a group is dropped when its last reader has read it; an
object goes when all that it holds is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flowrl.rows import Rows


@dataclass(frozen=True)
class Part:
    """One object: some fields of some rows."""

    ref: Any
    fields: frozenset[str]
    rows: Rows
    uids: frozenset[str]


class Store:
    """References by field."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._read: dict[str, set[str]] = {}
        """By field, the groups that every reader has read."""

    def add(self, ref: Any, fields: Iterable[str], rows: Rows) -> None:
        """An object with these fields of these rows."""
        self._parts.append(Part(ref, frozenset(fields), rows, frozenset(rows.uids)))

    def find(self, fields: Iterable[str], uids: Sequence[str]) -> list[Part]:
        """The objects that hold any of these fields for any of these groups."""
        wanted, groups = frozenset(fields), frozenset(uids)
        return [part for part in self._parts if part.fields & wanted and part.uids & groups]

    def holding(self, uids: Iterable[str]) -> list[Part]:
        """The objects that hold anything of these groups."""
        groups = frozenset(uids)
        return [part for part in self._parts if part.uids & groups]

    def release(self, fields: Iterable[str], uids: Iterable[str]) -> None:
        """These fields of these groups are no longer needed."""
        groups, is_news = set(uids), False
        for field in fields:
            read = self._read.setdefault(field, set())
            is_news = is_news or not groups <= read
            read |= groups
        if not is_news:
            return
        none: set[str] = set()
        self._parts = [p for p in self._parts if not all(p.uids <= self._read.get(field, none) for field in p.fields)]

    def forget(self, uids: Iterable[str]) -> None:
        """These groups are trained or given up."""
        gone = frozenset(uids)
        self.release({field for part in self._parts for field in part.fields}, gone)
        held = frozenset().union(*(part.uids for part in self._parts))
        for read in self._read.values():
            read &= held
