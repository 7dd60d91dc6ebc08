"""Where the columns of the current steps lie: for each field, references to the objects that hold it.

The driver holds references and identities only. A field is dropped when its last reader has read it; the object goes
when all of its fields are gone.
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
        self._dropped: set[str] = set()

    def add(self, ref: Any, fields: Iterable[str], rows: Rows) -> None:
        """An object with these fields of these rows."""
        self._parts.append(Part(ref, frozenset(fields), rows, frozenset(rows.uids)))

    def find(self, fields: Iterable[str], uids: Sequence[str]) -> list[Part]:
        """The objects that hold any of these fields for any of these groups."""
        wanted, groups = frozenset(fields), frozenset(uids)
        return [part for part in self._parts if part.fields & wanted and part.uids & groups]

    def release(self, fields: Iterable[str]) -> None:
        """These fields are no longer needed."""
        self._dropped.update(fields)
        self._parts = [part for part in self._parts if not part.fields <= self._dropped]

    def clear(self) -> None:
        """The step has ended."""
        self._parts, self._dropped = [], set()
