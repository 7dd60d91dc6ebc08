"""Layered layout: few crossings, short lines, no overlap.

The method of Sugiyama, Tagawa and Toda (1981): the items of each column are ordered by the barycentres of their
neighbors; then every item moves as near to its neighbors as order and sizes allow. A line that passes a column is an
item of that column, so that it runs between the others.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ROUNDS = 8
"""Sweeps over the columns, to and fro."""


@dataclass(frozen=True)
class Link:
    """A neighbor in the column before or after, with the heights at which the wire leaves and arrives."""

    other: Item
    own: float
    its: float
    weight: float


@dataclass(eq=False)
class Item:
    """Something that takes room in a column."""

    column: int
    height: float
    margin: float
    """Room above and below."""
    place: int = 0
    """Position in the column, from 0."""
    y: float = 0.0
    """Upper side."""
    before: list[Link] = field(default_factory=list)
    after: list[Link] = field(default_factory=list)


def lay_out(columns: list[list[Item]]) -> None:
    """Order each column, and set the height of each item; the uppermost lies at 0."""
    _order(columns)
    _settle(columns)


def _order(columns: list[list[Item]]) -> None:
    """Order each column by the middle of its neighbors, to and fro; the order with the fewest crossings stays."""
    _number(columns)
    best, fewest = [list(column) for column in columns], _crossings(columns)
    for number in range(ROUNDS):
        forward = number % 2 == 0
        for column in columns if forward else reversed(columns):
            middle = {item: _middle(item, item.before if forward else item.after) for item in column}
            column.sort(key=middle.__getitem__)
            _number([column])
        crossings = _crossings(columns)
        if crossings < fewest:
            best, fewest = [list(column) for column in columns], crossings
    columns[:] = best
    _number(columns)


def _number(columns: Iterable[list[Item]]) -> None:
    for column in columns:
        for place, item in enumerate(column):
            item.place = place


def _middle(item: Item, links: Sequence[Link]) -> float:
    if not links:
        return item.place
    return sum(link.other.place + link.its / max(link.other.height, 1.0) for link in links) / len(links)


def _crossings(columns: Iterable[list[Item]]) -> int:
    """Pairs of wires between two columns that cross."""
    found = 0
    for column in columns:
        ends: list[tuple[int, float]] = []
        for item in column:
            for link in sorted(item.after, key=lambda link: (link.own, link.other.place, link.its)):
                end = (link.other.place, link.its)
                found += len(ends) - bisect_right(ends, end)
                insort(ends, end)
    return found


def _settle(columns: list[list[Item]]) -> None:
    """Heights: every item as near to its neighbors as the order and the sizes of its column allow."""
    for column in columns:
        _place(column, [0.0] * len(column))
    for number in range(ROUNDS):
        forward = number % 2 == 0
        for column in columns if forward else reversed(columns):
            _place(column, [_wanted(item, item.before if forward else item.after) for item in column])
    for column in columns:
        _place(column, [_wanted(item, [*item.before, *item.after]) for item in column])
    top = min((item.y for column in columns for item in column), default=0.0)
    for item in (item for column in columns for item in column):
        item.y -= top


def _wanted(item: Item, links: Sequence[Link]) -> float:
    if not links:
        return item.y
    total = sum(link.weight for link in links)
    return sum(link.weight * (link.other.y + link.its - link.own) for link in links) / total


def _place(column: Sequence[Item], wanted: Sequence[float]) -> None:
    """The heights nearest to those wanted, in order and without overlap: isotonic regression by pooling neighbors."""
    offsets: list[float] = []
    pools: list[tuple[float, int]] = []
    offset = 0.0
    for item, want in zip(column, wanted, strict=True):
        offset += item.margin
        offsets.append(offset)
        total, size = want - offset, 1
        while pools and pools[-1][0] / pools[-1][1] >= total / size:
            more, count = pools.pop()
            total, size = total + more, size + count
        pools.append((total, size))
        offset += item.height + item.margin
    middles = [total / size for total, size in pools for _ in range(size)]
    for item, middle, offset in zip(column, middles, offsets, strict=True):
        item.y = middle + offset
