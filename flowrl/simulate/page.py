"""The comparison as one self-contained HTML file: nothing is fetched, there is no script, and names are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from flowrl.graph.plan import Plan
from flowrl.graph.words import count
from flowrl.simulate.compare import Comparison
from flowrl.simulate.gantt import Chart, chart, merged
from flowrl.simulate.report import advice, costs_in_words, rows, seconds_in_words, size_in_words, split_rows

COLORS = ("#2563eb", "#15803d", "#b45309", "#9333ea", "#be123c", "#0e7490", "#4d7c0f", "#be185d", "#475569", "#a16207")
"""Of nodes, in turn."""
WIDTH, LEFT, ROW, BAR = 1200.0, 110.0, 26.0, 18.0
"""Of a chart, of the names beside it, of a worker, of a bar."""
NARROWEST = 0.5
"""Bars of one node that are closer than this become one."""


def as_html(found: Comparison) -> str:
    """The page."""
    parts = {
        "name": escape(found.name),
        "facts": "\n".join(f"<p>{escape(line)}</p>" for line in (size_in_words(found), *costs_in_words(found.costs))),
        "advice": escape(advice(found)),
        "schedules": _table(rows(found)),
        "splits": _table(split_rows(found)),
        "legend": "".join(
            f'<li><span class="swatch {_color(found.own.plan, name)}"></span>{escape(name)}</li>'
            for name in found.own.plan.graph.order
        ),
        "charts": "\n".join(line for each in found.outcomes for line in _chart(chart(each), each.plan)),
        "colors": "\n".join(
            f".color-{number} {{ fill: {color}; background: {color}; }}" for number, color in enumerate(COLORS)
        ),
    }
    page = files("flowrl.simulate").joinpath("assets", "compare.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda name: parts[name[1]], page).rstrip("\n")


def _color(plan: Plan, node: str) -> str:
    return f"color-{plan.graph.order.index(node) % len(COLORS)}"


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *body = (["" if cell is None else escape(cell) for cell in line] for line in lines)
    cells = ["".join(f"<td>{cell}</td>" for cell in line) for line in body]
    rest = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{rest}</table>"


def _chart(drawn: Chart, plan: Plan) -> Iterator[str]:
    scale = (WIDTH - LEFT - 10) / drawn.seconds
    height = ROW * len(drawn.workers) + 24
    steps = f"{count(len(drawn.step_ends), 'step')} from step {drawn.first_step} on"
    yield f"<h2>{escape(drawn.title)}: {steps}, {seconds_in_words(drawn.seconds)}</h2>"
    yield f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(drawn.title)}">'
    for number, (worker, bars) in enumerate(drawn.workers.items()):
        top = ROW * number
        yield f'<text x="0" y="{top + BAR - 4:g}">{escape(worker)}</text>'
        yield f'<path class="row" d="M{LEFT:g} {top + ROW - 3:g}H{WIDTH - 10:g}"/>'
        for bar in merged(bars, NARROWEST / scale):
            width = max((bar.end - bar.start) * scale, NARROWEST)
            says = f"{bar.node}, {seconds_in_words(bar.end - bar.start)}" + (f", step {bar.step}" if bar.step else "")
            yield (
                f'<rect class="bar {_color(plan, bar.node)}" x="{LEFT + bar.start * scale:.1f}" y="{top + 2:g}" '
                f'width="{width:.1f}" height="{BAR:g}"><title>{escape(says)}</title></rect>'
            )
    for end in drawn.step_ends:
        yield f'<path class="step" d="M{LEFT + end * scale:.1f} 0V{height - 20:g}"/>'
    yield f'<text x="{LEFT:g}" y="{height - 6:g}">0</text>'
    yield f'<text x="{WIDTH - 10:g}" y="{height - 6:g}" text-anchor="end">{seconds_in_words(drawn.seconds)}</text>'
    yield "</svg>"
    if drawn.left_out:
        yield f"<p>and {count(drawn.left_out, 'worker')} more</p>"
