"""The page: one self-contained HTML file with the graph as SVG, and every node and field to look up.

Nothing is fetched: style and script are inline, and a content policy forbids the rest. Whatever users wrote enters as
escaped text, or as data from which the script makes text.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from pydantic import BaseModel

from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.graph.show.cards import HEAD_LINE, ROW, Card, Layout, Spot, arrange, cut, rounded, tip
from flowrl.graph.show.picture import COLORS, PREFIX, Arrow, Box, Picture, picture
from flowrl.graph.show.text import gate_in_words
from flowrl.graph.words import count

MARGIN, BAND_PAD, BAND_GAP, BAND_TITLE, CHANNEL, TRACK = 24.0, 22.0, 26.0, 26.0, 20.0, 8.0


def as_html(plan: Plan, unroll: int | None = None) -> str:
    """The page of a plan; with `unroll`, each of so many steps is a band of its own."""
    shown = picture(plan, unroll)
    cards = _cards(plan)
    batch, steps, mode = plan.document.batch, plan.document.run.steps, plan.document.schedule.mode
    facts = [
        f"{count(batch.prompts, 'prompt')} × {count(batch.group, 'sample')} = "
        f"{count(plan.num_samples, 'trajectory', 'trajectories')} a step",
        f"schedule {mode}" + (f", slack {plan.slack}" if plan.slack else ""),
        count(steps, "step") + (f", {unroll} drawn" if unroll else ""),
    ]
    parts = {
        "name": escape(shown.name),
        "facts": "".join(f"<li>{fact}</li>" for fact in facts),
        "legend": "".join(_legend(shown)),
        "picture": "\n".join(_picture(shown, cards, arrange(list(cards.values()), picture(plan).arrows))),
        "data": json.dumps(_data(plan)).replace("<", "\\u003c"),
        "colors": "\n".join(_colors()),
        **{name: _asset(f"page.{name}") for name in ("css", "js")},
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("flowrl.graph.show").joinpath("assets", name).read_text(encoding="utf-8")


def _colors() -> Iterator[str]:
    for number, color in enumerate(COLORS):
        yield f".pool-{number} {{ --fill: {color.fill}; --line: {color.line}; }}"


def _legend(shown: Picture) -> Iterator[str]:
    for pool in shown.pools:
        yield f'<li class="pool-{shown.color_of(pool)}"><span class="swatch"></span>pool {escape(pool)}</li>'
    kinds: dict[str, str] = {"field": "field", "weights": "weights", "gate": "gate", "carried": "to a later step"}
    drawn = {"carried" if arrow.distance else arrow.kind for arrow in shown.arrows}
    for kind, words in kinds.items():
        if kind in drawn:
            line = f'<svg width="34" height="10"><g class="edge edge-{kind}"><path class="line" d="M1 5H33"/></g></svg>'
            yield f"<li>{line}{words}</li>"


def _cards(plan: Plan) -> dict[str, Card]:
    """By node, what is written in its box."""
    single = picture(plan)
    num_inputs: Counter[str] = Counter()
    for arrow in single.arrows:
        num_inputs[arrow.target] += 1 if arrow.distance else len(arrow.labels)
    cards = {}
    for box in single.boxes:
        role = (f"{box.weights} {box.model}",) if box.model else ()
        rows = tuple((name, str(plan.graph.fields[name].type)) for name in box.writes)
        name = f"{box.node}   {box.note}" if box.note else box.node
        cards[box.key] = Card(box.key, box.column, (name, box.use, *role), rows, num_inputs[box.key])
    return cards


@dataclass(frozen=True)
class _Band:
    """Where a step is drawn: the upper side of its band, and of what is in it."""

    top: float
    start: float
    end: float


def _picture(shown: Picture, cards: dict[str, Card], layout: Layout) -> Iterator[str]:
    """The SVG, from the back to the front."""
    keys = {box.key: box for box in shown.boxes}
    carried = [arrow for arrow in shown.arrows if arrow.distance]
    bands = _bands(shown, layout, Counter(keys[arrow.target].step for arrow in carried))
    left = MARGIN + BAND_PAD * (None not in bands)
    width = layout.width + 2 * left + TRACK * (4 + max((arrow.slack for arrow in carried), default=0))
    bottom = max(band.end for band in bands.values())
    height = bottom + MARGIN + 20 * len(shown.notes)
    yield f'<g id="view" data-width="{width:g}" data-height="{height:.1f}">'
    for step, band in bands.items():
        if step is not None:
            yield (
                f'<rect class="band" x="{MARGIN:g}" y="{band.top:.1f}" width="{width - 2 * MARGIN:g}" '
                f'height="{band.end - band.top:.1f}" rx="14"/>'
                f'<text class="band-title" x="{MARGIN + 16:g}" y="{band.top + 22:.1f}">step {step}</text>'
            )
        yield f'<g transform="translate({left:g} {band.start:.1f})">'
        yield from _wires(layout, step, keys.keys())
        yield "</g>"
    yield from _carried(carried, keys, layout, bands, left)
    used = {label for arrow in shown.arrows if arrow.kind != "weights" for label in arrow.labels}
    for box in shown.boxes:
        spot = layout.spots[box.node]
        yield from _box(shown, used, box, cards[box.node], spot, left + spot.x, bands[box.step].start + spot.y)
    for number, note in enumerate(shown.notes, 1):
        yield f'<text class="remark" x="{MARGIN:g}" y="{bottom + 4 + 20 * number:.1f}">{escape(note)}</text>'
    yield "</g>"


def _bands(shown: Picture, layout: Layout, channels: Counter[int | None]) -> dict[int | None, _Band]:
    """The bands of the steps, each with room for the arrows that come into it from above."""
    bands, top = {}, MARGIN
    for step in shown.steps:
        pad = BAND_PAD if step is not None else 0.0
        start = top + pad + BAND_TITLE * (step is not None) + CHANNEL * channels[step]
        bands[step] = _Band(top, start, start + layout.height + pad)
        top = bands[step].end + BAND_GAP
    return bands


def _wires(layout: Layout, step: int | None, keys: Collection[str]) -> Iterator[str]:
    at = "" if step is None else f"@{step}"
    for wire in layout.wires:
        source, target = wire.source + at, wire.target + at
        if source in keys and target in keys:
            about = {"field": wire.label} if wire.kind != "weights" else {}
            about |= {"order": PREFIX[wire.kind] + wire.label} if wire.kind != "field" else {}
            yield _edge(wire.kind, source, target, about, wire.line, wire.tip)


def _edge(kind: str, source: str, target: str, about: dict[str, str], line: str, head: str, text: str = "") -> str:
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in about.items())
    return (
        f'<g class="edge edge-{kind}" data-from="{source}" data-to="{target}"{data}>'
        f'<path class="line" d="{line}"/><path d="{head}"/>{text}</g>'
    )


def _carried(
    arrows: list[Arrow], keys: dict[str, Box], layout: Layout, bands: dict[int | None, _Band], left: float
) -> Iterator[str]:
    """Arrows to a later step: down the gap right of their source, along above the band of their target, and in."""
    channels: Counter[int | None] = Counter()
    for number, arrow in enumerate(arrows):
        source, target = keys[arrow.source], keys[arrow.target]
        start, end = layout.spots[source.node], layout.spots[target.node]
        right, x = left + start.x + start.width, left + end.x
        y = bands[source.step].start + start.y + min(24.0, start.height / 2)
        finish = bands[target.step].start + layout.carried[source.node, target.node]
        channel = bands[target.step].start - CHANNEL * (channels[target.step] + 0.6)
        out, into = right + TRACK * (2 + number % (arrow.slack + 2)), x - TRACK * (3 + channels[target.step])
        channels[target.step] += 1
        line = rounded([(right, y), (out, y), (out, channel), (into, channel), (into, finish), (x, finish)])
        text = f'<text class="label" x="{(out + into) / 2:.1f}" y="{channel - 5:.1f}">{escape(cut(arrow.label))}</text>'
        yield _edge("carried", arrow.source, arrow.target, {"order": arrow.label}, line, tip(x, finish), text)


def _box(shown: Picture, used: Collection[str], box: Box, card: Card, spot: Spot, x: float, y: float) -> Iterator[str]:
    """A card: its head, and a row for each field; all of them can be reached by keyboard."""
    color = f"pool-{shown.color_of(box.pool)}" if box.pool else "data"
    place = f"pool {box.pool}" if box.pool else "training data"
    width, head = spot.width, card.head_height if card.rows else spot.height
    yield (
        f'<g class="node {color}" transform="translate({x:g} {y:.1f})" data-node="{box.node}" data-key="{box.key}" '
        f'tabindex="0" role="button" aria-label="{escape(f"{box.key}, {box.use}, {place}")}">'
        f'<path class="head" d="{_outline(width, 0, head, above=True, below=not card.rows)}"/>'
    )
    for number, line in enumerate((box.node, *card.head[1:])):
        role = ("name", "use", "role")[number]
        yield f'<text class="{role}" x="14" y="{20 + HEAD_LINE * number:g}">{escape(cut(line))}</text>'
    if box.note:
        yield f'<text class="note" text-anchor="end" x="{width - 12:g}" y="20">{escape(box.note)}</text>'
    yield "</g>"
    if card.rows:
        outline = _outline(width, head, spot.height, above=False, below=True)
        yield f'<path class="body {color}" transform="translate({x:g} {y:.1f})" d="{outline}"/>'
    for number, (name, type_) in enumerate(card.rows):
        unread = "" if name in used else " unread"
        yield (
            f'<g class="field{unread} {color}" data-field="{escape(name)}" data-key="{box.key}" '
            f'transform="translate({x:g} {y + head + ROW * number:.1f})" tabindex="0" role="button" '
            f'aria-label="{escape(f"field {name}, {type_}, written by {box.key}")}">'
            f'<rect class="row" x="2" width="{width - 4:g}" height="{ROW:g}" rx="4"/>'
            f'<text class="fname" x="14" y="14">{escape(cut(name))}</text>'
            f'<text class="ftype" text-anchor="end" x="{width - 13:g}" y="14">{escape(type_)}</text>'
            f'<circle class="port" cx="{width:g}" cy="{ROW / 2:g}" r="3.5"/></g>'
        )


def _outline(width: float, top: float, bottom: float, *, above: bool, below: bool) -> str:
    """A box whose upper or lower corners are round."""
    up, down = 9.0 * above, 9.0 * below
    return (
        f"M0 {top + up:g}Q0 {top:g} {up:g} {top:g}H{width - up:g}Q{width:g} {top:g} {width:g} {top + up:g}"
        f"V{bottom - down:g}Q{width:g} {bottom:g} {width - down:g} {bottom:g}"
        f"H{down:g}Q0 {bottom:g} 0 {bottom - down:g}Z"
    )


def _data(plan: Plan) -> dict[str, Any]:
    """What the panel shows, by node and by field."""
    fields = {
        field.name: {
            "type": str(field.type),
            "shape": plan.shape(field),
            "writer": field.writer,
            "readers": plan.readers(field),
        }
        for field in plan.graph.fields.values()
    }
    nodes = {box.node: _node(plan, plan.graph.nodes[box.node], box) for box in picture(plan).boxes if box.pool}
    return {"fields": fields, "nodes": {DATA: _dataset(plan), **nodes}}


def _node(plan: Plan, node: BoundNode, box: Box) -> dict[str, Any]:
    assert node.node is not None, "checked before"
    named = node.spec.pool or box.pool
    pool = f"{named}, on the workers of {box.pool}" if named != box.pool else box.pool
    facts = {
        "pool": pool,
        "model": node.model,
        "weights": node.weights,
        "scope": node.cls.scope,
        "cardinality": node.cls.cardinality,
        "gate": gate_in_words(node, plan.document.batch.prompts) or None,
        "runs": box.note or None,
        "on error": node.on_error,
        "timeout": f"{node.spec.timeout:g} s" if node.spec.timeout else None,
        "tags": ", ".join(node.spec.tags) or None,
    }
    return {
        "use": node.use,
        "doc": inspect.cleandoc(node.cls.__doc__ or ""),
        "facts": {key: value for key, value in facts.items() if value is not None},
        "parameters": _parameters(node.node, node.spec.params),
        "reads": [(port, field) for port, fields in node.reads.items() for field in fields],
        "writes": list(node.writes.items()),
    }


def _dataset(plan: Plan) -> dict[str, Any]:
    train = plan.document.data["train"]
    columns = [field.name for field in plan.graph.fields.values() if field.writer == DATA]
    return {
        "use": train.type,
        "doc": inspect.cleandoc(type(train).__doc__ or ""),
        "facts": {},
        "parameters": _parameters(train, train.model_fields_set, leave_out="type"),
        "reads": [],
        "writes": [(name, name) for name in columns],
    }


def _parameters(settings: BaseModel, given: Collection[str], leave_out: str = "") -> list[tuple[str, str, bool, str]]:
    """Name, value, whether the document sets it, and what it means."""
    values = settings.model_dump()
    return [
        (name, json.dumps(values[name], ensure_ascii=False, default=str), name in given, field.description or "")
        for name, field in type(settings).model_fields.items()
        if name != leave_out
    ]
