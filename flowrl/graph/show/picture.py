"""The picture of a plan: boxes and arrows as a value, from which every drawing is made.

A plan is drawn once, its carried edges as waiting for the step before; or unrolled, as K consecutive steps under its
schedule. Then the nodes of step k are `name@k`, and a carried edge of distance d leads from step k to step
k + d + slack: the first step that has to wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.graph.words import count


@dataclass(frozen=True)
class Color:
    """How a pool looks in a terminal, and on paper."""

    terminal: str
    fill: str
    line: str


COLORS = (
    Color("blue", "#dbeafe", "#2563eb"),
    Color("green", "#dcfce7", "#15803d"),
    Color("magenta", "#f3e8ff", "#9333ea"),
    Color("yellow", "#fef3c7", "#b45309"),
    Color("cyan", "#cffafe", "#0e7490"),
    Color("red", "#ffe4e6", "#be123c"),
    Color("bright_green", "#ecfccb", "#4d7c0f"),
    Color("bright_magenta", "#fce7f3", "#be185d"),
)
"""The colors of pools, in turn."""

Kind = Literal["field", "weights", "gate"]
PREFIX: Mapping[Kind, str] = {"field": "", "weights": "weights of ", "gate": "gate "}


class PictureError(Exception):
    """A picture that cannot be drawn on this machine."""


@dataclass(frozen=True)
class Box:
    """A node of one step, or the training data of one step."""

    key: str
    """`rollout`, or `rollout@2` when unrolled."""
    node: str
    """Name of the node; `data` for the training data."""
    step: int | None
    """From 1; None when not unrolled."""
    use: str
    """What the node is; for the data, the type of the data set."""
    pool: str | None
    """Group of workers; None for the data."""
    model: str | None
    weights: str | None
    """What the node does with the model's weights."""
    column: int
    """0 for the data, else the node's level from 1."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    times: int = 1
    """How often it runs in a step."""
    every: int = 1
    """In every so many-th step it runs."""
    validates: str = ""
    """Of an evaluation when it runs and on which data; of a node that only evaluations need, that it is such a one."""

    @property
    def note(self) -> str:
        """How often it runs, where that is not once in every step."""
        times = f"x{self.times} a step" if self.times > 1 else ""
        every = f"every {self.every} steps" if self.every > 1 else ""
        return self.validates or ", ".join(filter(None, (times, every)))


@dataclass(frozen=True)
class Arrow:
    """The edges of one kind between two boxes."""

    source: str
    target: str
    kind: Kind
    labels: tuple[str, ...]
    """Names of fields, or of models."""
    text: str
    """What it carries, in words."""
    when: str = ""
    """For a carried arrow: that it leads to a later step, and its slack."""
    distance: int = 0
    """Steps by which the target is later."""
    slack: int = 0
    """Further steps that the target may run ahead."""

    @property
    def returns(self) -> bool:
        """Whether it is drawn within one step, though it leads to the next: against the order of the step."""
        return self.distance > 0 and "@" not in self.target

    @property
    def label(self) -> str:
        """What it carries, and when."""
        return f"{self.text}, {self.when}" if self.when else self.text


@dataclass(frozen=True)
class Picture:
    """Everything that a drawing shows."""

    name: str
    title: str
    steps: tuple[int | None, ...]
    """The steps drawn; (None,) when not unrolled."""
    pools: tuple[str, ...]
    boxes: tuple[Box, ...]
    """In an order that respects every arrow within a step, step by step."""
    arrows: tuple[Arrow, ...]
    """In the order of the boxes that they come from."""
    beyond: tuple[Arrow, ...]
    """Arrows from a step that is drawn to one that is not."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each arrow that leads past the last step."""
        return tuple(
            f"to step {arrow.target.rpartition('@')[2]}: {arrow.source} -> {arrow.target}, slack {arrow.slack}"
            for arrow in self.beyond
        )

    def color_of(self, pool: str) -> int:
        """Which of the colors a pool has."""
        return self.pools.index(pool) % len(COLORS)

    def of_step(self, step: int | None) -> tuple[Box, ...]:
        """The boxes of one step."""
        return tuple(box for box in self.boxes if box.step == step)


def picture(plan: Plan, unroll: int | None = None) -> Picture:
    """The picture of a plan; with `unroll`, of so many consecutive steps.

    Raises ValueError if `unroll` is less than 1.
    """
    if unroll is not None and unroll < 1:
        raise ValueError(f"unroll must be at least 1, got {unroll}")
    steps = (None,) if unroll is None else tuple(range(1, unroll + 1))
    boxes = {box.key: box for step in steps for box in _boxes(plan, step)}
    place = {key: number for number, key in enumerate(boxes)}
    arrows = [arrow for step in steps for arrow in _arrows(plan, step) if arrow.source in boxes]
    arrows.sort(key=lambda arrow: (place[arrow.source], place.get(arrow.target, len(place)), arrow.kind, arrow.target))
    batch, document = plan.document.batch, plan.document
    title = (
        f"{document.name}: {count(batch.prompts, 'prompt')} x {count(batch.group, 'sample')} = "
        f"{count(plan.num_samples, 'trajectory', 'trajectories')} a step, "
        f"schedule {document.schedule.mode}" + (f", slack {plan.slack}" if plan.slack else "")
    )
    return Picture(
        document.name,
        title,
        steps,
        tuple(plan.pools),
        tuple(boxes.values()),
        tuple(arrow for arrow in arrows if arrow.target in boxes),
        tuple(arrow for arrow in arrows if arrow.target not in boxes),
    )


def plain(text: str) -> str:
    """A text without control characters: names of fields may be anything, and a terminal acts on some."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _key(name: str, step: int | None) -> str:
    return name if step is None else f"{name}@{step}"


def _runs(plan: Plan, name: str, step: int | None) -> bool:
    if name == DATA or step is None:
        return True
    if name in plan.graph.only_validated:
        return any(name in plan.graph.leading_to(walk.evaluations) for walk in plan.walks(step))
    return step % plan.graph.nodes[name].spec.every == 0


def _boxes(plan: Plan, step: int | None) -> Iterator[Box]:
    columns = tuple(field.name for field in plan.graph.fields.values() if field.writer == DATA)
    train = plan.document.data["train"].type
    yield Box(_key(DATA, step), DATA, step, train, None, None, None, 0, (), columns)
    cut = _on_a_cut_batch(plan)
    for column, level in enumerate(plan.graph.levels, 1):
        for node in (plan.graph.nodes[name] for name in level if _runs(plan, name, step)):
            times = plan.updates_per_sync if node.name in cut else 1
            yield _box(plan, node, step, column, times)


def _box(plan: Plan, node: BoundNode, step: int | None, column: int, times: int) -> Box:
    return Box(
        _key(node.name, step),
        node.name,
        step,
        node.use,
        plan.pool_of(node),
        node.model,
        node.weights,
        column,
        node.fields_read,
        tuple(node.writes.values()),
        times,
        node.spec.every,
        _validates(plan, node),
    )


def _validates(plan: Plan, node: BoundNode) -> str:
    if node.evaluation is not None:
        return f"{node.evaluation.when(node.spec.every)}, on {node.evaluation.dataset}"
    return "in validation only" if node.name in plan.graph.only_validated else ""


def _on_a_cut_batch(plan: Plan) -> set[str]:
    """The nodes that run once for each batch that the schedule cuts: all that a rollout leads to, but no sync."""
    rollouts = {node.name for node in plan.graph.nodes.values() if node.weights == "generates"}
    reached = set(rollouts)
    for name in plan.graph.order:
        node = plan.graph.nodes[name]
        trains = node.weights != "syncs" and name not in plan.graph.only_validated
        if trains and any(field.writer in reached for field in plan.reads(node)):
            reached.add(name)
    return reached - rollouts


def _arrows(plan: Plan, step: int | None) -> Iterator[Arrow]:
    grouped: dict[tuple[str, str, Kind, int], list[str]] = {}
    for edge in plan.graph.edges:
        grouped.setdefault((edge.source, edge.target, edge.kind, edge.distance), []).append(edge.label)
    for (source, target, kind, distance), labels in grouped.items():
        slack = plan.slack if distance else 0
        end = None if step is None else step + distance + slack
        if _runs(plan, target, end):
            text = PREFIX[kind] + ", ".join(labels)
            when = _when(slack, unrolled=step is not None) if distance else ""
            yield Arrow(_key(source, step), _key(target, end), kind, tuple(labels), text, when, distance, slack)


def _when(slack: int, *, unrolled: bool) -> str:
    if unrolled:
        return f"slack {slack}"
    return f"next step, slack {slack}" if slack else "next step"
