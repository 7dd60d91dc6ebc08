"""Toy batches: small, ragged and awkward columns for any declared port, and a node run on them without an engine."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from flowrl.batch import COLUMN_CLASSES, Batch, PromptToken, Step, Token
from flowrl.column import Column, as_array
from flowrl.data.stream import prompt_name
from flowrl.fields import Axis, Dtype, FieldType
from flowrl.join import concat
from flowrl.model import ModelSpec
from flowrl.node import Context, Node
from flowrl.rows import Rows, offsets_of

VOCABULARY = 20
"""Token ids lie below this, and from 2 up: the shipped model reads them, and none of them ends or pads."""
OF_SAMPLES: tuple[Axis, ...] = ("Sample", "Token", "PromptToken")
LENGTHS = (3, 0, 1, 5, 2)
KNOWN: Mapping[str, Callable[[int], Any]] = {
    "prompt": lambda i: f"{i}+2=",
    "entry": lambda i: {
        "question": f"{i}+2=", "answer": f"{i + 2}", "metadata": {"source_dataset": "basic_arithmetic"}
    },
}  # fmt: skip
"""Columns of data that mean something, and that no row lacks: the value of each prompt."""


def toy_batch(
    types: type[Node] | Node | Mapping[str, FieldType | str],
    *,
    num_prompts: int = 3,
    group: int | Sequence[int] = 2,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
    nulls: int = 1,
    masks: bool = True,
    num_fields: int = 2,
) -> Batch:
    """Columns for the ports of a node, or for fields by name: `toy_batch({"reward": "Sample[float]"})`.

    Groups are uneven, of `group` sessions and one more or less, unless their sizes are given one by one. Responses take
    their lengths from `lengths` in turn. The last `nulls` values of a column that may lack some are null. With `masks`
    false, no token is in any mask. A list port `x` gets the columns `x.0`, `x.1`, ...: `num_fields` of them. Without a
    field of samples or tokens the batch holds prompts only, as a rollout gets it.
    """
    declared = _fields(types, num_fields)
    sizes = [max(1, group + (0, 1, -1)[g % 3]) for g in range(num_prompts)] if isinstance(group, int) else group
    uids = sorted(prompt_name(g % 2, 3 * g + 2) for g in range(len(sizes)))
    if any(type_.axis in OF_SAMPLES for type_ in declared.values()):
        sessions = [session for size in sizes for session in range(size)]
        rows = Rows(uids, np.repeat(np.arange(len(sizes)), sizes), sessions, planned=sizes, settled=sizes)
    else:
        rows = Rows(uids, planned=sizes, settled=[0] * len(sizes))
    toy = _Toy(rows, np.resize(np.asarray(lengths, np.int64), len(rows)), seed, nulls, masks)
    return Batch(rows, {name: toy.column(name, type_) for name, type_ in declared.items()}, declared)


def _fields(types: type[Node] | Node | Mapping[str, FieldType | str], num_fields: int) -> dict[str, FieldType]:
    if isinstance(types, Mapping):
        return {name: type_ if isinstance(type_, FieldType) else _parsed(type_) for name, type_ in types.items()}
    ports = types.active_ports() if isinstance(types, Node) else types.input_ports
    found: dict[str, FieldType] = {}
    for name, port in ports.items():
        found |= dict.fromkeys([f"{name}.{i}" for i in range(num_fields)] if port.many else [name], port.type)
    return found


def _parsed(text: str) -> FieldType:
    axis, _, dtype = text.rstrip("]").partition("[")
    if axis not in get_args(Axis) or dtype not in get_args(Dtype):
        raise ValueError(f"'{text}' is no field type: write Axis[dtype], such as Sample[float] or Token[int]")
    return FieldType(axis, dtype)  # type: ignore[arg-type]


class _Toy:
    """Draws the columns of one batch; each follows from the seed and its own name alone."""

    def __init__(self, rows: Rows, lengths: Any, seed: int, nulls: int, masks: bool) -> None:
        self.rows, self.lengths, self.seed, self.nulls, self.masks = rows, lengths, seed, nulls, masks

    def column(self, name: str, type_: FieldType) -> Column[Any]:
        draw = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        if type_.axis == "Step":
            return Step(self.rows, {"int": 8, "float": 1.0, "bool": True, "str": "a", "json": {"a": 1}}[type_.dtype])
        if type_.axis == "Token":
            values = self._tokens(draw, name, type_.dtype, int(self.lengths.sum()))
            return Token(self.rows, values, offsets_of(self.lengths))
        if type_.axis == "PromptToken":  # all such columns are of the same prompts
            sizes = 2 + np.arange(self.rows.num_groups) % 3
            values = self._tokens(draw, name, type_.dtype, int(sizes.sum()))
            return PromptToken(self.rows, values, offsets_of(sizes), self.rows.group.copy())
        size = self.rows.num_groups if type_.axis == "Prompt" else len(self.rows)
        drawn = self._single(draw, type_, size)
        if name in KNOWN and type_ == FieldType("Prompt", "json"):
            drawn = [KNOWN[name](index) for index in range(size)]
        elif type_.nullable:
            drawn[max(0, size - self.nulls) :] = [None] * min(size, self.nulls)
        return COLUMN_CLASSES[type_.axis](self.rows, as_array(drawn, type_.dtype))

    def _tokens(self, draw: np.random.Generator, name: str, dtype: Dtype, size: int) -> Any:
        if dtype == "int":
            return draw.integers(2, VOCABULARY, size)
        if dtype == "bool":
            return (np.arange(size) % 3 != 1) & self.masks
        if dtype == "float":
            drawn = draw.normal(size=size).astype(np.float32)
            return -np.abs(drawn) if "log_prob" in name else drawn
        return as_array([f"t{i}" if dtype == "str" else {"t": i} for i in range(size)], dtype)

    def _single(self, draw: np.random.Generator, type_: FieldType, size: int) -> list[Any]:
        """One value for each row or group; numbers in the text of a sample, sums in the text of a prompt."""
        numbers = draw.integers(0, 10, (size, 2)).tolist()
        if type_.dtype == "str":
            if type_.axis == "Prompt":
                return [f"{a}+{b}=" for a, b in numbers]
            return ["é" * (i == 2) + str(a) if self.lengths[i] else "" for i, (a, _) in enumerate(numbers)]
        if type_.dtype == "json":
            return [[{"a": a}, [a, b], "text", b][i % 4] for i, (a, b) in enumerate(numbers)]
        if type_.dtype == "bool":
            return [i % 2 == 0 for i in range(size)]
        return [a for a, _ in numbers] if type_.dtype == "int" else draw.normal(size=size).round(3).tolist()


def toy_context(node: Node, seed: int = 0) -> Context:
    """A worker of its own on the CPU; a node that works on a model gets the shipped one, to train, and frozen ones."""
    models = {name: ModelSpec(path=node.toy_model) for name in node.also_reads().values()}
    models["policy"] = ModelSpec(path=node.toy_model, head=node.head, trainable=True)
    name = "policy" if node.weights is not None else None
    return Context(node=type(node).__name__, model=name, models=models, seed=seed)


def arguments(node: Node, batch: Batch, absent: Sequence[str] = ()) -> dict[str, Any]:
    """What `run` is called with: the batch's columns by port, None for optional ports that have none."""
    given: dict[str, Any] = {}
    for name, port in node.input_ports.items():
        many = [column for field, column in batch.columns.items() if field.rpartition(".")[0] == name]
        found = (many or None) if port.many else batch.columns.get(name)
        given[name] = None if name in absent else found
        if given[name] is None and not port.optional:
            raise TypeError(f"{type(node).__name__}.run reads '{name}' ({port.type}), which was not given")
    return given


def joined(node: Node, parts: Sequence[Any]) -> Any:
    """The blocks of a stream as one `Out`; None where there were none."""
    if len(parts) < 2:
        return parts[0] if parts else None
    types = {name: port.type for name, port in node.output_ports.items()}
    whole = concat([Batch(_rows(part), dict(zip(types, _columns(part), strict=True)), types) for part in parts])
    first = [whole.rows] if node.cardinality == "expands" else []
    return type(parts[0])(*first, *whole.columns.values())


def run_node(node: Node, batch: Batch | None = None, /, *, context: Context | None = None, **fields: Any) -> Any:
    """The node's `Out` for these columns, by port: `run_node(Mine(), reward=...)`, or with a toy batch as a start.

    `setup` runs first, on a worker of its own unless a context is given; the blocks of a stream are joined; a list
    port takes a list of columns.
    """
    given = {name: column for name, column in fields.items() if not isinstance(column, list)}
    given |= {
        f"{name}.{i}": one for name, many in fields.items() if isinstance(many, list) for i, one in enumerate(many)
    }
    strange = sorted(set(fields) - set(node.input_ports))
    if strange:
        raise TypeError(f"{type(node).__name__}.run reads no '{strange[0]}'; it reads {', '.join(node.input_ports)}")
    columns = {**(batch.columns if batch is not None else {}), **given}
    rows = batch.rows if batch is not None else next((column.rows for column in columns.values()), Rows(()))
    called = arguments(node, Batch(rows, columns, {}))
    node.setup(context or toy_context(node))
    result = node.run(**called)  # type: ignore[attr-defined]
    return joined(node, list(result)) if isinstance(result, Iterator) else result


def _rows(out: Any) -> Rows:
    return out[0] if isinstance(out[0], Rows) else out[0].rows


def _columns(out: Any) -> list[Column[Any]]:
    return [value for value in out if isinstance(value, Column)]
