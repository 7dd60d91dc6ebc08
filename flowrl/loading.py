"""The training data of a run: loaded, its prompts counted as the rollouts read them, enough for a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flowrl.data.base import BAD_DATA, Lengths, Loading, Placed
from flowrl.data.rows import Row
from flowrl.data.stream import PromptStream
from flowrl.data.values import PROMPT
from flowrl.errors import PipelineError, Place, Problem
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.spec.read import Reading


class Notes:
    """What a person should read, kept until there is somebody who takes it."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self._taker: Callable[[str], None] = self.kept.append

    def __call__(self, text: str) -> None:
        """One more."""
        self._taker(text)

    def send_to(self, taker: Callable[[str], None]) -> None:
        """Hand over what was kept, and from now on whatever comes."""
        self._taker = taker
        for text in self.kept:
            taker(text)


def load_prompts(plan: Plan, reading: Reading, note: Callable[[str], None]) -> PromptStream:
    """The training data in the order of the run. Raises `PipelineError` where it cannot fill a batch.

    `note` takes what a person should know of it.
    """
    train = plan.document.data["train"]

    def place(*keys: str) -> Place:
        return reading.place(("data", "train", *keys))

    told: list[str] = []

    def noted(text: str) -> None:
        told.append(text)
        note(text)

    try:
        rows = train.load(Loading("data.train", place, prompt_lengths(plan, place), noted))
        prompts = PromptStream(rows, plan.document.run.seed, train.shuffle)
        short = prompts.shortage(plan.document.prompts_in_flight)
    except OSError as error:
        fact = f"data.train cannot be read: {error.strerror or error}"
        raise PipelineError([Problem(BAD_DATA, place("type"), fact)]) from error
    if short:
        fix = f"add rows, allow longer prompts, or lower {plan.document.decides_prompts_in_flight}"
        where = place("max_prompt_tokens" if train.max_prompt_tokens is not None else "type")
        raise PipelineError([Problem(BAD_DATA, where, f"data.train: {short}", fix, tuple(told))])
    return prompts


def prompt_lengths(plan: Plan, place: Placed) -> Lengths:
    """Counts the tokens of rows' prompts as the rollouts read them, the most where there are several."""
    columns = [field.name for field in plan.graph.fields.values() if field.writer == DATA]
    rollouts: list[tuple[BoundNode, str]] = []
    for node in plan.graph.nodes.values():
        read = [field for field in node.reads.get(PROMPT, ()) if field in columns]
        if node.weights == "generates" and node.node is not None and read:
            rollouts.append((node, read[0]))

    def count(node: BoundNode, prompts: Sequence[Any]) -> Sequence[int] | None:
        assert node.node is not None and node.model is not None, "checked before"
        try:
            return node.node.prompt_lengths(plan.document.models[node.model], prompts)
        except Exception as error:  # of the tokenizer, the template, or a class of the user's
            fact = f"nodes.{node.name} cannot count the tokens of the prompts: {error}"
            raise PipelineError([Problem(BAD_DATA, place("max_prompt_tokens"), fact)]) from error

    def lengths(rows: Sequence[Row]) -> list[int] | None:
        counts = [counted for node, field in rollouts if (counted := count(node, [row[field] for row in rows]))]
        return [max(each) for each in zip(*counts, strict=True)] if counts else None

    return lengths
