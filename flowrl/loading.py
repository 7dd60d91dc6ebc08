"""The data of a run: loaded, its prompts tried and counted as the rollouts read them, enough to train or validate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from flowrl.data.base import BAD_DATA, DataSet, Lengths, Loading
from flowrl.data.mixture import SOURCE_COLUMN
from flowrl.data.rows import Loaded, Mixed, Part, Row, Streamed
from flowrl.data.stream import Prompt, PromptStream, prompt_name
from flowrl.data.values import PROMPT
from flowrl.errors import PipelineError, Place, Problem
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA, Graph
from flowrl.graph.plan import Plan
from flowrl.graph.validation import evaluation_of
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
    with loading_of(plan, reading, "train", plan.graph.training, note) as (loading, told, readers):
        train = plan.document.data["train"]
        prompts = PromptStream(loaded(train, loading, readers), plan.document.run.seed, train.shuffle)
        if short := prompts.shortage(plan.document.prompts_in_flight):
            lower = f"lower {plan.document.decides_prompts_in_flight}"
            raise PipelineError([_too_few(train, loading, told, short, f"add rows, allow longer prompts, or {lower}")])
        return prompts


def load_validation(plan: Plan, reading: Reading, note: Callable[[str], None]) -> dict[str, tuple[Prompt, ...]]:
    """The rows of every evaluation, by its name, in the order of the data. Raises `PipelineError` where there are none.

    Their uids are those of no training row: `val:u17` is row 17 of data set `val`.
    """
    found: dict[str, tuple[Prompt, ...]] = {}
    for walk in plan.walks():
        data = plan.document.data[walk.dataset]
        with loading_of(plan, reading, walk.dataset, plan.graph_of(walk), note) as (loading, told, readers):
            rows = list(islice(_numbered(loaded(data, loading, readers), loading, walk.max_rows), walk.max_rows))
            if not rows:
                raise PipelineError([_too_few(data, loading, told, "there is no row to validate on", "add rows")])
        prompts = tuple(row._replace(name=f"{walk.dataset}:{row.name}") for row in rows)
        found |= dict.fromkeys(walk.evaluations, prompts)
    _refuse_same_names(plan, reading, found)
    return found


def _numbered(rows: Loaded, loading: Loading, max_rows: int | None) -> Iterator[Prompt]:
    """The rows of all sources one after the other. Raises `PipelineError` for a stream without a `max_rows`."""
    for source, part in enumerate(rows.parts if isinstance(rows, Mixed) else (Part(rows),)):
        if isinstance(part.rows, Streamed) and max_rows is None:
            fact = f"{loading.name} is read as a stream, of which nobody knows the end before it comes"
            fix = "max_rows: 500 in the node that evaluates"
            raise PipelineError([Problem(BAD_DATA, loading.place("type"), fact, fix)])
        position = 0
        while part.rows.reaches(position + 1) if isinstance(part.rows, Streamed) else position < len(part.rows):
            yield Prompt(prompt_name(0, position, source), {**part.defaults, **part.rows[position]})
            position += 1


def _refuse_same_names(plan: Plan, reading: Reading, found: Mapping[str, Sequence[Prompt]]) -> None:
    """FR032: two evaluations that would report the same names, for rows of the same source."""
    owners: dict[tuple[str, str], str] = {}
    for name, prompts in found.items():
        node = plan.graph.nodes[name]
        evaluation, column = evaluation_of(node), node.reads.get(SOURCE_COLUMN, ("",))[0]
        for source in dict.fromkeys(str(prompt.row.get(column) or evaluation.dataset) for prompt in prompts):
            other = owners.setdefault((evaluation.prefix, source), name)
            if other != name:
                fact = f"nodes.{name} and nodes.{other} would both report {evaluation.prefix}/{source}/..."
                place, fix = reading.place(("nodes", name), key=True), f"prefix: {evaluation.prefix}_{name}"
                raise PipelineError([Problem("FR032", place, fact, f"nodes.{name}: {{{fix}}}")])


@contextmanager
def loading_of(
    plan: Plan, reading: Reading, name: str, graph: Graph, note: Callable[[str], None]
) -> Iterator[tuple[Loading, list[str], list[_Reader]]]:
    """What a data set is loaded with, what it says meanwhile, and who of a graph's nodes reads its prompts.

    What cannot be read becomes a problem.
    """

    def place(*keys: str) -> Place:
        return reading.place(("data", name, *keys))

    told: list[str] = []

    def noted(text: str) -> None:
        told.append(text)
        note(text)

    readers = _readers(plan, reading, name, graph)
    columns = tuple(dict.fromkeys(reader.column for reader in readers))
    try:
        yield Loading(f"data.{name}", place, _lengths(readers), noted, columns), told, readers
    except OSError as error:
        fact = f"data.{name} cannot be read: {error.strerror or error}"
        raise PipelineError([Problem(BAD_DATA, place("type"), fact, "give data that may be read")]) from error


def loaded(data: DataSet, loading: Loading, readers: Sequence[_Reader]) -> Loaded:
    """The rows, whose first prompts every rollout has tried."""
    rows = data.load(loading)
    _try(readers, rows)
    return rows


def _too_few(data: DataSet, loading: Loading, told: Sequence[str], fact: str, fix: str) -> Problem:
    where = loading.place("max_prompt_tokens" if data.max_prompt_tokens is not None else "type")
    return Problem(BAD_DATA, where, f"{loading.name}: {fact}", fix, tuple(told))


@dataclass(frozen=True)
class _Reader:
    """A rollout, and the column that it reads as its prompts."""

    node: BoundNode
    column: str
    model: ModelSpec
    reading: Reading
    data: str
    """Name of the data set."""

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
            place = self.reading.place(("data", self.data, key))
            fact = f"nodes.{self.node.name} cannot count the tokens of the prompts: {getattr(error, 'fact', error)}"
            problem = Problem(BAD_DATA, place, fact, getattr(error, "fix", "") or _ANOTHER_PROMPT)
        raise PipelineError([problem])

    def tries(self, row: Row) -> bool:
        """Whether a prompt should be tried before a worker starts: a model that comes with flowrl takes any text."""
        model = self.model
        known = model.path in shipped_models() and not (model.tokenizer or model.chat_template)
        return not (known and isinstance(row[self.column], str))


def _readers(plan: Plan, reading: Reading, data: str, graph: Graph) -> list[_Reader]:
    columns = [field.name for field in graph.fields.values() if field.writer == DATA]
    found = []
    for node in graph.nodes.values():
        read = [field for field in node.reads.get(PROMPT, ()) if field in columns]
        if node.weights == "generates" and node.node is not None and node.model is not None and read:
            found.append(_Reader(node, read[0], plan.document.models[node.model], reading, data))
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
