"""Pictures of a plan as text: a tree, a mermaid flowchart, Graphviz's dot and svg, and JSON for tools."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flowrl.graph.plan import Plan
from flowrl.graph.show.picture import COLORS, Arrow, Box, Picture, PictureError, picture, plain


@dataclass(frozen=True)
class _Branch:
    """A line of a tree, lines that explain it, and what hangs on it."""

    line: str
    details: Sequence[str] = ()
    branches: Sequence[_Branch] = ()


def _twigs(branches: Sequence[_Branch], indent: str = "") -> Iterator[str]:
    for branch in branches:
        last = branch is branches[-1]
        yield f"{indent}{'└─' if last else '├─'} {branch.line}"
        inner = indent + ("   " if last else "│  ")
        yield from (f"{inner}   {detail}" for detail in branch.details)
        yield from _twigs(branch.branches, inner)


def as_tree(plan: Plan, *, color: bool = False, unroll: int | None = None) -> str:
    """The graph as indented levels, with what each node waits for; `color` paints names in the color of their pool."""
    shown = picture(plan, unroll)
    paint = _painter(shown) if color else _no_paint
    waits: dict[str, list[str]] = {}
    for arrow in shown.arrows:
        waits.setdefault(arrow.target, []).append(_wait(arrow))
    steps: list[_Branch] = []
    for step in shown.steps:
        levels: dict[int, list[_Branch]] = {}
        for box in shown.of_step(step):
            if box.pool is not None:
                line = f"{paint(box.key, box.pool)}  [{plain(box.use)}]  pool {box.pool}" + f"  {box.note}".rstrip()
                levels.setdefault(box.column, []).append(_Branch(line, waits.get(box.key, ())))
        branches = [_Branch(f"level {number}", (), nodes) for number, nodes in levels.items()]
        steps += branches if step is None else [_Branch(f"step {step}", (), branches)]
    legend = ["pools: " + "  ".join(paint(f"■ {pool}", pool) for pool in shown.pools)] * color
    return "\n".join([shown.name, *_twigs(steps), *shown.notes, *legend])


def _wait(arrow: Arrow) -> str:
    """What a node waits for, seen from that node."""
    before = ", the step before" if arrow.returns else ""
    return f"← {arrow.source}{before}: {plain(arrow.text)}" + f", slack {arrow.slack}" * ("slack" in arrow.when)


def _painter(shown: Picture) -> Callable[[str, str], str]:
    from rich.color import ColorSystem
    from rich.style import Style

    styles = {pool: Style(color=COLORS[shown.color_of(pool)].terminal, bold=True) for pool in shown.pools}
    return lambda text, pool: styles[pool].render(text, color_system=ColorSystem.STANDARD)


def _no_paint(text: str, pool: str) -> str:
    return text


_LINK = {"field": "-->", "weights": "-.->", "gate": "--x"}


def as_mermaid(plan: Plan, unroll: int | None = None) -> str:
    """A mermaid flowchart: field edges solid, weight edges dotted, gates crossed, carried edges thick."""
    shown = picture(plan, unroll)
    ends = {arrow.target for arrow in shown.arrows if arrow.distance}  # drawn from the left where they come first
    lines = ["flowchart LR"]
    for step in shown.steps:
        indent = "  " if step is None else "    "
        lines += [f'  subgraph step_{step}["step {step}"]', f"{indent}direction LR"] * (step is not None)
        boxes = sorted(shown.of_step(step), key=lambda box: box.key not in ends)
        lines += [f"{indent}{_mermaid_box(shown, box)}" for box in boxes]
        lines += ["  end"] * (step is not None)
    for arrow in shown.arrows:
        label = "<br/>".join(map(_mermaid_text, arrow.labels if arrow.kind == "field" else (arrow.label,)))
        link = "==>" if arrow.distance else _LINK[arrow.kind]
        lines.append(f'  {_mermaid_id(arrow.source)} {link}|"{label}"| {_mermaid_id(arrow.target)}')
    lines += [f'  note{number}["{_mermaid_text(note)}"]:::note' for number, note in enumerate(shown.notes, 1)]
    lines += ["  classDef note fill:none,stroke:none"] * bool(shown.notes)
    for number in sorted({shown.color_of(pool) for pool in shown.pools}):
        lines.append(f"  classDef pool{number} fill:{COLORS[number].fill},stroke:{COLORS[number].line},color:#111")
    return "\n".join(lines)


def _mermaid_box(shown: Picture, box: Box) -> str:
    name = _mermaid_text(box.key)
    if box.pool is None:
        return f'{_mermaid_id(box.key)}[("{name}")]'
    note = f"<br/>{box.note}" if box.note else ""
    text = f"{name}<br/><i>{_mermaid_text(box.use)}</i><br/>pool {box.pool}{note}"
    return f'{_mermaid_id(box.key)}["{text}"]:::pool{shown.color_of(box.pool)}'


def _mermaid_id(key: str) -> str:
    """A word that is none of mermaid's own (`end`) and no piece of a link (`--`); names have no dot, so keys differ."""
    return "n." + key.replace("-", ".").replace("@", "..")


def _mermaid_text(text: str) -> str:
    """Characters that mermaid or HTML may take for their own, as mermaid's numeric entities."""
    return re.sub(r"[^\w .,()/*+=>@-]", lambda found: f"#{ord(found[0])};", plain(text))


def as_dot(plan: Plan, unroll: int | None = None) -> str:
    """The graph for Graphviz: clusters by pool, or by step when unrolled; carried edges are bold."""
    shown = picture(plan, unroll)
    lines = [
        f"digraph {_quoted(shown.name)} {{",
        f"  graph [rankdir=LR, labelloc=t, fontname={_FONT}, label={_quoted(shown.title, *shown.notes)}]",
        f'  node [shape=box, style="rounded,filled", fontname={_FONT}, fontsize=11]',
        f"  edge [fontname={_FONT}, fontsize=9, arrowsize=0.7]",
    ]
    clusters: dict[str, list[Box]] = {}
    for box in shown.boxes:
        cluster = f"step {box.step}" if box.step is not None else f"pool {box.pool}" if box.pool else ""
        clusters.setdefault(cluster, []).append(box)
    for cluster, boxes in clusters.items():
        inside = [f"  {_dot_box(shown, box)}" for box in boxes]
        head = (
            f'  subgraph {_quoted(f"cluster {cluster}")} {{ label={_quoted(cluster)}; color="#94a3b8"; style=rounded;'
        )
        lines += [head, *(f"  {line}" for line in inside), "  }"] if cluster else inside
    lines += [f"  {_dot_arrow(arrow)}" for arrow in shown.arrows]
    return "\n".join([*lines, "}"])


_FONT = '"Helvetica,Arial,sans-serif"'
_STYLE = {"field": "solid", "weights": "dotted", "gate": "dashed"}


def _dot_box(shown: Picture, box: Box) -> str:
    if box.pool is None:
        return (
            f'{_quoted(box.key)} [label={_quoted(box.key, box.use)}, shape=cylinder, style=filled, fillcolor="#f1f5f9"]'
        )
    color = COLORS[shown.color_of(box.pool)]
    label = _quoted(box.key, box.use, *filter(None, (f"pool {box.pool}" * (box.step is not None), box.note)))
    return f'{_quoted(box.key)} [label={label}, fillcolor="{color.fill}", color="{color.line}"]'


def _dot_arrow(arrow: Arrow) -> str:
    style = "bold" if arrow.distance else _STYLE[arrow.kind]
    style += ", constraint=false" * arrow.returns
    label = _quoted(*(arrow.labels if arrow.kind == "field" and not arrow.distance else (arrow.label,)))
    return f"{_quoted(arrow.source)} -> {_quoted(arrow.target)} [label={label}, style={style}]"


def _quoted(*lines: str) -> str:
    """A string of Graphviz, which knows entities and backslash escapes inside quotes."""
    escaped = (plain(line).replace("\\", "\\\\").replace('"', '\\"').replace("&", "&amp;") for line in lines)
    return '"' + "\\n".join(escaped) + '"'


SVG_TIMEOUT = 60.0
"""Seconds that Graphviz may take."""


def as_svg(plan: Plan, unroll: int | None = None) -> str:
    """The graph as laid out by Graphviz on this machine. Raises `PictureError` where it is missing or gives up."""
    program = shutil.which("dot")
    if program is None:
        raise PictureError(
            "Graphviz's `dot` is not installed, and --as svg needs it; --as mermaid and --as html need nothing"
        )
    try:
        done = subprocess.run(
            [program, "-Tsvg"], input=as_dot(plan, unroll), capture_output=True, check=True, encoding="utf-8",
            timeout=SVG_TIMEOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PictureError(f"Graphviz's `dot` took more than {SVG_TIMEOUT:g} s; --as html draws large graphs") from None
    except subprocess.CalledProcessError as error:
        raise PictureError(f"Graphviz's `dot` failed: {error.stderr.strip()}") from None
    except OSError as error:
        raise PictureError(f"Graphviz's '{program}' cannot be run: {error.strerror or error}") from None
    return done.stdout


def as_picture_data(plan: Plan, unroll: int | None = None) -> dict[str, Any]:
    """The picture as plain data for tools: boxes, arrows, and the arrows that lead past the last step."""
    shown = picture(plan, unroll)
    schedule = plan.document.schedule.mode
    return {
        "name": shown.name,
        "schedule": schedule,
        "slack": plan.slack,
        "unroll": unroll,
        "boxes": [_as_data(box) for box in shown.boxes],
        "arrows": [_as_data(arrow) for arrow in shown.arrows],
        "beyond": [_as_data(arrow) for arrow in shown.beyond],
    }


def _as_data(value: Box | Arrow) -> dict[str, Any]:
    return {key: list(found) if isinstance(found, tuple) else found for key, found in asdict(value).items()}
