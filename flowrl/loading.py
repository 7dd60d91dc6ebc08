"""The training data of a run: loaded, its prompts counted as the rollouts read them, enough for a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowrl.data.base import BAD_DATA, Lengths, Loading
from flowrl.data.rows import Loaded, Mixed, Row, Streamed
from flowrl.data.stream import PromptStream
from flowrl.data.values import PROMPT
from flowrl.errors import PipelineError, Place, Problem
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.plan import Plan
from flowrl.model import ModelSpec
from flowrl.model_files import ModelError, shipped_models
from flowrl.spec.read import Reading

_ANOTHER_MODEL = "give a causal language model that transformers can load, with its tokenizer"
_ANOTHER_PROMPT = "correct the prompts, or give the model a `chat_template` that takes them"


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

    readers = _readers(plan, reading)
    columns = tuple(dict.fromkeys(reader.column for reader in readers))
    try:
        rows = train.load(Loading("data.train", place, _lengths(readers), noted, columns))
        _try(readers, rows)
        prompts = PromptStream(rows, plan.document.run.seed, train.shuffle)
        short = prompts.shortage(plan.document.prompts_in_flight)
    except OSError as error:
        fact = f"data.train cannot be read: {error.strerror or error}"
        raise PipelineError([Problem(BAD_DATA, place("type"), fact, "give data that may be read")]) from error
    if short:
        fix = f"add rows, allow longer prompts, or lower {plan.document.decides_prompts_in_flight}"
        where = place("max_prompt_tokens" if train.max_prompt_tokens is not None else "type")
        raise PipelineError([Problem(BAD_DATA, where, f"data.train: {short}", fix, tuple(told))])
    return prompts


@dataclass(frozen=True)
class _Reader:
    """A rollout, and the column that it reads as its prompts."""

    node: BoundNode
    column: str
    model: ModelSpec
    reading: Reading

    def count(self, rows: Sequence[Row], key: str) -> Sequence[int] | None:
        """Tokens of the prompts; None where nobody can tell. Raises `PipelineError`.

        `key` is the one of the data to change where the prompts are to blame.
        """
        assert self.node.node is not None, "checked before"
        try:
            return self.node.node.prompt_lengths(self.model, [row[self.column] for row in rows])
        except ModelError as error:
            place = self.reading.place(("models", str(self.node.model), "path"))
            problem = Problem("FR010", place, f"models.{self.node.model}: {error.fact}", error.fix or _ANOTHER_MODEL)
        except Exception as error:  # of the template, or a class of the user's
            place = self.reading.place(("data", "train", key))
            fact = f"nodes.{self.node.name} cannot count the tokens of the prompts: {getattr(error, 'fact', error)}"
            problem = Problem(BAD_DATA, place, fact, getattr(error, "fix", "") or _ANOTHER_PROMPT)
        raise PipelineError([problem])

    def tries(self, row: Row) -> bool:
        """Whether a prompt should be tried before a worker starts: a model that comes with flowrl takes any text."""
        model = self.model
        known = model.path in shipped_models() and not (model.tokenizer or model.chat_template)
        return not (known and isinstance(row[self.column], str))


def _readers(plan: Plan, reading: Reading) -> list[_Reader]:
    columns = [field.name for field in plan.graph.fields.values() if field.writer == DATA]
    found = []
    for node in plan.graph.nodes.values():
        read = [field for field in node.reads.get(PROMPT, ()) if field in columns]
        if node.weights == "generates" and node.node is not None and node.model is not None and read:
            found.append(_Reader(node, read[0], plan.document.models[node.model], reading))
    return found


def _lengths(readers: Sequence[_Reader]) -> Lengths:
    """Counts the tokens of rows' prompts as the rollouts read them, the most where there are several."""

    def lengths(rows: Sequence[Row]) -> list[int] | None:
        counts = [counted for one in readers if (counted := one.count(rows, "max_prompt_tokens"))]
        return [max(each) for each in zip(*counts, strict=True)] if counts else None

    return lengths


def _try(readers: Sequence[_Reader], loaded: Loaded) -> None:
    """Ask each rollout for the first prompt of each source: its model or its chat template may not take it."""
    parts = [part.rows for part in loaded.parts] if isinstance(loaded, Mixed) else [loaded]
    for rows in parts:
        if rows.reaches(1) if isinstance(rows, Streamed) else rows:
            for reader in readers:
                if reader.tries(rows[0]):
                    reader.count([rows[0]], "type")
