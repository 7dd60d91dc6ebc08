"""Where the cards and wires of a page lie: a column for each level, and wires that pass between the cards.

The wires of one card that skip a column pass it together, as a cable.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from flowrl.graph.show.layout import Item, Link, lay_out
from flowrl.graph.show.picture import Arrow, Kind, plain

ROW, HEAD_LINE, HEAD_PAD, LANE, SLOT = 20.0, 16.0, 14.0, 7.0, 10.0
CARD_MARGIN, CABLE_MARGIN = 16.0, 7.0
CHARACTER = 7.3
"""Width of a character of the largest text, whatever monospaced font is there."""
MAX_CHARACTERS = 40
MAX_BENDS = 20_000
"""A page of more wire bends than this draws its wires straight through."""


def columns_of(text: str) -> int:
    """Cells that a text takes in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def cut(text: str) -> str:
    """A text as it is drawn: long ones are cut, the page's panel has them whole."""
    text = plain(text)
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"


@dataclass(frozen=True)
class Card:
    """What is written in a box: lines of a head, and a row for each field that it writes."""

    key: str
    column: int
    head: tuple[str, ...]
    rows: tuple[tuple[str, str], ...]
    """Field and type."""
    num_inputs: int

    @property
    def head_height(self) -> float:
        """Height of the head; the rows follow."""
        return HEAD_PAD + HEAD_LINE * len(self.head)

    @property
    def height(self) -> float:
        """Room for every row, and for every wire that ends here."""
        rows = len(self.rows) * ROW + 6 * bool(self.rows)
        return max(self.head_height + rows, (self.num_inputs + 1) * SLOT)

    @cached_property
    def width(self) -> float:
        """Room for the longest line."""
        rows = [f"{cut(name)}   {type_}" for name, type_ in self.rows]
        return 32 + CHARACTER * max(columns_of(line) for line in [*map(cut, self.head), *rows])

    def out(self, kind: Kind, label: str) -> float:
        """Height at which a wire leaves: at the row of its field, else at the head."""
        names = [name for name, _ in self.rows] if kind != "weights" else []
        return self.head_height + (names.index(label) + 0.5) * ROW if label in names else self.head_height / 2


@dataclass(frozen=True)
class Spot:
    """Where a card lies."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Wire:
    """One field, or one reason to wait, from one card to another."""

    source: str
    target: str
    kind: Kind
    label: str
    line: str
    """As in the `d` of an SVG path."""
    tip: str
    """The arrow's head."""


@dataclass(frozen=True)
class Layout:
    """Cards and wires of one step; (0, 0) is the upper left corner."""

    spots: Mapping[str, Spot]
    wires: tuple[Wire, ...]
    carried: Mapping[tuple[str, str], float]
    """Height at which a wire from an earlier step ends, by source and target."""
    width: float
    height: float


@dataclass(eq=False)
class _Cable(Item):
    """The wires of one card that pass a column."""

    lanes: dict[tuple[Kind, str], float] = field(default_factory=dict)

    def lane(self, kind: Kind, label: str) -> float:
        """Height of a wire within the cable."""
        if (kind, label) not in self.lanes:
            self.lanes[kind, label] = self.height + LANE / 2
            self.height += LANE
        return self.lanes[kind, label]


@dataclass(frozen=True)
class _Route:
    """A wire before it is drawn: where it passes, and at which height of each item."""

    source: str
    target: str
    kind: Kind
    label: str
    stops: tuple[tuple[Item, float], ...]
    """From the source to the last item before the target."""

    @property
    def last(self) -> float:
        """Height from which it comes to the target."""
        item, offset = self.stops[-1]
        return item.y + offset


def arrange(cards: Sequence[Card], arrows: Iterable[Arrow]) -> Layout:
    """The places of cards and wires. Carried arrows take a place at their target, and are drawn by `rounded`."""
    arrows = list(arrows)
    items = {card.key: Item(card.column, card.height, CARD_MARGIN) for card in cards}
    routes, cables = _routes({card.key: card for card in cards}, items, arrows)
    columns: list[list[Item]] = [[] for _ in range(max(item.column for item in items.values()) + 1)]
    for item in (*items.values(), *cables):
        columns[item.column].append(item)
    lay_out(columns)
    sides = _sides(cards, routes)
    spots = {
        card.key: Spot(sides[card.column][0], items[card.key].y, _breadth(sides[card.column]), card.height)
        for card in cards
    }
    wires, carried = _wires(routes, spots, sides, [(arrow.source, arrow.target) for arrow in arrows if arrow.distance])
    height = max(spot.y + spot.height for spot in spots.values())
    height = max([height, *(cable.y + cable.height for cable in cables)])
    return Layout(spots, tuple(wires), carried, sides[-1][1], height)


def _routes(
    cards: Mapping[str, Card], items: Mapping[str, Item], arrows: Iterable[Arrow]
) -> tuple[list[_Route], list[_Cable]]:
    """Every wire with the cables that it passes, linked to its neighbors."""
    ends = [(a.source, a.target, a.kind, label) for a in arrows if not a.distance for label in a.labels]
    ends.sort(key=lambda end: (end[0], cards[end[0]].out(end[2], end[3]), end[1]))
    num_bends = sum(cards[target].column - cards[source].column - 1 for source, target, _, _ in ends)
    cables: dict[tuple[str, int], _Cable] = {}
    routes = []
    for source, target, kind, label in ends:
        stops: list[tuple[Item, float]] = [(items[source], cards[source].out(kind, label))]
        passed = range(cards[source].column + 1, cards[target].column) if num_bends <= MAX_BENDS else ()
        for column in passed:
            cable = cables.setdefault((source, column), _Cable(column, 0.0, CABLE_MARGIN))
            stops.append((cable, cable.lane(kind, label)))
        routes.append(_Route(source, target, kind, label, tuple(stops)))
    _link(routes, items)
    return routes, list(cables.values())


def _link(routes: Iterable[_Route], items: Mapping[str, Item]) -> None:
    """Tell all items of their neighbors; wires of one field share their way up to where they part."""
    joined: dict[tuple[Item, float, Item, float], None] = {}
    for route in routes:
        way = [*route.stops, (items[route.target], items[route.target].height / 2)]
        joined |= {(*start, *end): None for start, end in pairwise(way)}
    for start, leaves, end, arrives in joined:
        weight = 1.0 + 2.0 * isinstance(start, _Cable) + 2.0 * isinstance(end, _Cable)
        start.after.append(Link(end, leaves, arrives, weight))
        end.before.append(Link(start, arrives, leaves, weight))


def _sides(cards: Sequence[Card], routes: Sequence[_Route]) -> list[tuple[float, float]]:
    """Left and right side of each column; the more wires run between two columns, the more room is between them."""
    num_columns = max(card.column for card in cards) + 1
    widths, lines = [0.0] * num_columns, [set[tuple[Item, float]]() for _ in range(num_columns)]
    for card in cards:
        widths[card.column] = max(widths[card.column], card.width)
    for route in routes:
        for item, offset in route.stops:
            lines[item.column].add((item, offset))
    sides, x = [], 0.0
    for width, starts in zip(widths, lines, strict=True):
        sides.append((x, x + width))
        x += width + min(60.0 + 4.0 * len(starts), 150.0)
    return sides


def _breadth(side: tuple[float, float]) -> float:
    return side[1] - side[0]


def _wires(
    routes: Sequence[_Route],
    spots: Mapping[str, Spot],
    sides: Sequence[tuple[float, float]],
    carried: Sequence[tuple[str, str]],
) -> tuple[list[Wire], dict[tuple[str, str], float]]:
    """Wires end at the left side of their target in the order in which they come; carried ones come from above."""
    coming: dict[str, list[_Route | tuple[str, str]]] = {}
    for pair in carried:
        coming.setdefault(pair[1], []).append(pair)
    for route in sorted(routes, key=lambda route: route.last):
        coming.setdefault(route.target, []).append(route)
    wires, heights = [], {}
    for target, found in coming.items():
        spot = spots[target]
        room = min(16.0, (spot.height - SLOT) / len(found))
        y = spot.y + spot.height / 2 - room * (len(found) - 1) / 2
        for one in found:
            if isinstance(one, _Route):
                wires.append(
                    Wire(one.source, target, one.kind, one.label, _line(one, sides, spot.x, y), tip(spot.x, y))
                )
            else:
                heights[one] = y
            y += room
    return wires, heights


def _line(route: _Route, sides: Sequence[tuple[float, float]], x: float, y: float) -> str:
    item, offset = route.stops[0]
    at = (sides[item.column][1], item.y + offset)
    parts = [f"M{at[0]:g} {at[1]:.1f}"]
    for cable, lane in route.stops[1:]:
        left, right = sides[cable.column]
        parts += [_curve(at, (left, cable.y + lane)), f"H{right:g}"]
        at = (right, cable.y + lane)
    return "".join([*parts, _curve(at, (x, y))])


def _curve(start: tuple[float, float], end: tuple[float, float]) -> str:
    middle = (start[0] + end[0]) / 2
    return f"C{middle:g} {start[1]:.1f} {middle:g} {end[1]:.1f} {end[0]:g} {end[1]:.1f}"


def tip(x: float, y: float) -> str:
    """The head of an arrow that ends here, pointing right."""
    return f"M{x - 7:g} {y - 4:.1f}L{x:g} {y:.1f}L{x - 7:g} {y + 4:.1f}"


def rounded(points: Sequence[tuple[float, float]], radius: float = 10.0) -> str:
    """A line through these points, its corners rounded."""
    parts = [f"M{points[0][0]:g} {points[0][1]:.1f}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        start, end = _towards(corner, before, radius), _towards(corner, after, radius)
        parts.append(f"L{start[0]:g} {start[1]:.1f}Q{corner[0]:g} {corner[1]:.1f} {end[0]:g} {end[1]:.1f}")
    x, y = points[-1]
    return "".join([*parts, f"L{x:g} {y:.1f}"])


def _towards(start: tuple[float, float], end: tuple[float, float], reach: float) -> tuple[float, float]:
    length = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1e-9)  # along one axis
    share = min(reach / length, 0.5)
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share
