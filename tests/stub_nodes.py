"""Small nodes for the tests of graph, schedule and engine, and pipelines made of them: `use: stub_nodes:Mix`."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, PrivateAttr

from flowrl.batch import Prompt, Sample, Step, Token
from flowrl.engine.call import NodeSetup
from flowrl.metrics import failure, metric
from flowrl.node import Context, Node
from flowrl.nodes._backend.engine import engines_of
from flowrl.nodes._backend.weights import Update as WeightUpdate
from flowrl.registry import NodeRef
from flowrl.rows import Rows


class Source(Node):
    """A number for each sample."""

    class Out(NamedTuple):
        value: Sample[float]

    def run(self, prompt: Prompt[str]) -> Out:
        return self.Out(Sample(prompt.rows, np.arange(len(prompt.rows), dtype=np.float32)))


class Label(Node):
    """A text for each prompt."""

    class Out(NamedTuple):
        label: Prompt[str]

    def run(self, prompt: Prompt[str]) -> Out:
        return self.Out(prompt)


class Mix(Node):
    """The sum of any number of values."""

    class Out(NamedTuple):
        value: Sample[float]

    def run(self, inputs: list[Sample[float]]) -> Out:
        return self.Out(Sample(inputs[0].rows, np.sum([column.values for column in inputs], axis=0)))


class Optional(Node):
    """A value, and another one if anybody writes it; `eager` demands it."""

    eager: bool = False

    class Out(NamedTuple):
        value: Sample[float]

    def needs(self) -> dict[str, bool]:
        return {"extra": True} if self.eager else {}

    def run(self, value: Sample[float], extra: Sample[float] | None = None) -> Out:
        return self.Out(value if extra is None else value + extra)


class Spread(Node):
    """A value for each token; waits for the whole batch."""

    scope = "batch"

    class Out(NamedTuple):
        tokens: Token[float]

    def run(self, value: Sample[float], response_mask: Token[bool]) -> Out:
        return self.Out(value.per_token(response_mask))


class Beyond(Node):
    """What a reward is beyond the values that a critic gives its tokens."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], values: Token[float], response_mask: Token[bool]) -> Out:
        return self.Out(reward.per_token(response_mask) - values, response_mask)


class Returns(Beyond):
    """The same, and the returns that the values should be."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]
        returns: Token[float]

    def run(self, reward: Sample[float], values: Token[float], response_mask: Token[bool]) -> Out:  # type: ignore[override]
        returns = reward.per_token(response_mask)
        return self.Out(returns - values, response_mask, returns)


class Rollout(Node):
    """Two tokens for each of the planned sessions, one group at a time."""

    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    fail_at: int | None = None
    """Position of the group at which it breaks off."""
    lost: str = ""
    """The session that fails."""

    class Out(NamedTuple):
        rows: Rows
        response_mask: Token[bool]
        response: Sample[str]

    def run(self, prompt: Prompt[str]) -> Iterator[Out]:
        for group, (uid, size) in enumerate(zip(prompt.rows.uids, prompt.rows.planned.tolist(), strict=True)):
            if group == self.fail_at:
                raise RuntimeError("the engine is gone")
            sessions = [session for session in range(size) if f"{uid}_{session}_0" != self.lost]
            if len(sessions) < size:
                failure([self.lost], RuntimeError("the session is lost"))
            size = len(sessions)
            rows = Rows([uid], [0] * size, sessions)
            metric("rollout/tokens", 2 * size, reduce="sum")
            yield self.Out(rows, Token.of(rows, [[True, True]] * size), Sample(rows, [f"{uid}!"] * size))


class Read(Node):
    """Reads the training weights."""

    weights = "reads"
    device = "accelerator"

    class Out(NamedTuple):
        log_probs: Token[float]

    def run(self, response_mask: Token[bool]) -> Out:
        return self.Out(response_mask * -0.5)


class Update(Node):
    """Changes the training weights."""

    scope = "batch"
    weights = "updates"
    pure = False
    device = "accelerator"

    minibatch: int = 1

    def run(self, response_mask: Token[bool], log_probs: Token[float] | None = None) -> None:
        metric("actor/tokens", float(response_mask.values.sum()))


class Witness(Node):
    """Notes a hash of every value of each trained sample in a file: `step identity field hash`."""

    scope = "batch"
    pure = False

    file: str
    """Where to."""

    _step: int = PrivateAttr(0)

    def run(
        self,
        response_ids: Token[int],
        rollout_log_probs: Token[float],
        old_log_probs: Token[float],
        advantages: Token[float],
        loss_mask: Token[bool],
        reward: Sample[float],
    ) -> None:
        self._step += 1
        columns = {name: column for name, column in locals().items() if name not in ("self", "columns")}
        with open(self.file, "a", encoding="utf-8") as file:
            for field, column in columns.items():
                parts = column.jagged if isinstance(column, Token) else column.values
                for name, part in zip(column.rows.names(), parts, strict=True):
                    found = hashlib.sha256(np.asarray(part).tobytes()).hexdigest()
                    file.write(f"{self._step} {name} {field} {found}\n")


class Writer(Update):
    """Changes the training weights and writes a field."""

    class Out(NamedTuple):
        late: Token[bool]


class Sync(Node):
    """Sends them, and tells the engines of its model their next version."""

    weights = "syncs"
    pure = False
    device = "accelerator"

    tells: bool = True
    _context: Context = PrivateAttr()

    def setup(self, context: Context) -> None:
        self._context = context

    def receiver(self) -> str:
        return "here"

    def send(self, receivers: Sequence[Any]) -> Iterator[int]:
        assert set(receivers) == {"here"}
        yield from (7, 7)

    def receive(self, part: Any, version: int) -> None:
        assert part == 7
        for engine in engines_of(self._context).values() if self.tells else ():
            engine.begin_update(WeightUpdate({}))
            engine.finish_update(version)


class Mute(Exception):
    """An error that cannot be shown."""

    def __str__(self) -> str:
        return str(1 / 0)


class Judge(Node):
    """A score for each response, with a row that goes wrong in the asked way."""

    bad: str = ""
    """The response on which it goes wrong."""
    how: str = "raise"

    _ready: bool = PrivateAttr(False)

    class Out(NamedTuple):
        score: Sample[float]

    def setup(self, context: Context) -> None:
        if self.how == "setup":
            raise RuntimeError("no model here")
        self._ready = True

    def run(self, response: Sample[str]) -> Out:
        assert self._ready, "setup comes before run"
        metric("judge/seen", len(response.rows), reduce="sum")
        values: list[Any] = [float(len(text)) for text in response]
        for index, text in enumerate(response):
            if text == self.bad:
                values[index] = self.misbehave()
        return self.Out(Sample(response.rows, values))

    def misbehave(self) -> Any:
        if self.how == "raise":
            raise ZeroDivisionError("nothing to divide")
        if self.how == "loop":
            while True:
                pass
        if self.how == "sleep":
            time.sleep(60)
        if self.how == "die":
            os._exit(1)
        if self.how == "exit":
            raise SystemExit(3)
        if self.how == "interrupt":
            raise KeyboardInterrupt
        if self.how == "cancel":
            raise asyncio.CancelledError
        if self.how == "mute":
            raise Mute
        if self.how == "power":
            pow(3, 10**9)
        return {"none": None, "nan": float("nan"), "infinity": float("inf")}.get(self.how, "1.5")


class StreamJudge(Node):
    """A score for each response, as a stream of blocks."""

    times: int = 1
    how: str = ""
    empty: bool = False
    """Whether a block without rows comes first."""

    class Out(NamedTuple):
        score: Sample[float]

    def run(self, response: Sample[str]) -> Iterator[Any]:
        if self.empty:
            none = Rows(())
            yield self.Out(Sample(none, []))
        scores = Sample(response.rows, [float(len(text)) for text in response])
        for _ in range(self.times):
            if self.how == "axis":
                yield (Prompt(response.rows, np.zeros(response.rows.num_groups)),)
            else:
                yield scores if self.how == "bare" else self.Out(scores)


class Wrong(Node):
    """Returns something else than its Out declares."""

    how: str = ""
    scope = "group"

    class Out(NamedTuple):
        score: Sample[float]
        counts: Token[int]

    def run(self, response_mask: Token[bool]) -> Any:
        rows = response_mask.rows
        score, counts = (
            Sample[float](rows, np.zeros(len(rows))),
            Token(rows, response_mask.values, response_mask.offsets),
        )
        if self.how == "axis":
            return self.Out(counts, counts)
        if self.how == "number":
            return (score,)
        if self.how == "text":
            return self.Out(Sample(rows, ["x"] * len(rows)), counts)
        if self.how == "fraction":
            return self.Out(score, counts * 0.5)
        if self.how in ("infinite", "null"):
            return self.Out(score + float("inf" if self.how == "infinite" else "nan"), counts)
        if self.how == "two rows":
            return self.Out(Sample(rows.take(np.array([0])), [1.0]), counts)
        if self.how == "fewer":
            first = rows.take(np.array([0]))
            return self.Out(Sample(first, [1.0]), Token(first, [1], np.array([0, 1])))
        if self.how == "strange":
            strange = Rows.of(["elsewhere"])
            return self.Out(Sample(strange, [1.0]), Token(strange, [1], np.array([0, 1])))
        return self.Out(score, counts)


class NotFinite(Node):
    """A token that is not finite, where the prompt asks for it."""

    value: float = Field(0.5, allow_inf_nan=True)
    scope = "group"

    class Out(NamedTuple):
        weights_of_tokens: Token[float]
        limit: Step[float]

    def run(self, response_mask: Token[bool]) -> Out:
        weights = np.where(response_mask.values, self.value, 0.0)
        return self.Out(Token(response_mask.rows, weights, response_mask.offsets), Step(response_mask.rows, 1.0))


class TwoReductions(Node):
    """Reports one metric in two ways."""

    scope = "group"

    class Out(NamedTuple):
        mask: Token[bool]

    def run(self, response_mask: Token[bool]) -> Iterator[Out]:
        metric("x", 1.0)
        yield self.Out(response_mask)
        metric("x", 1.0, reduce="sum")


class Gate(Node):
    """Which groups to keep."""

    scope = "group"

    class Out(NamedTuple):
        keep: Prompt[bool]
        score_again: Sample[float]

    def run(self, score: Sample[float]) -> Out:
        return self.Out(Prompt(score.rows, np.ones(score.rows.num_groups, dtype=np.bool_)), score)


class LateGate(Node):
    """Which groups to keep, judged after the update."""

    scope = "group"

    class Out(NamedTuple):
        keep: Prompt[bool]

    def run(self, late: Token[bool]) -> Out:
        return self.Out(Prompt(late.rows, np.ones(late.rows.num_groups, dtype=np.bool_)))


class Mean(Node):
    """The mean over the tokens of each sample."""

    class Out(NamedTuple):
        mean: Sample[float]

    def run(self, tokens: Token[float]) -> Out:
        return self.Out(tokens.mean("sample"))


class Blend(Node):
    """The sum of any number of values of tokens, and of others if anybody writes them."""

    class Out(NamedTuple):
        blend: Token[float]
        level: Sample[float]

    def run(self, parts: list[Token[float]], more: list[Token[float]] | None = None) -> Out:
        blend = sum(parts[1:], parts[0])
        return self.Out(blend, blend.mean("sample"))


class Chosen(Node):
    """Values of the groups that are kept, and a text for each prompt."""

    class Out(NamedTuple):
        chosen: Sample[float]
        text: Prompt[str]

    def run(self, keep: Prompt[bool], value: Sample[float], label: Prompt[str]) -> Out:
        return self.Out(value, label)


class Fresh(Node):
    """Right only for samples of the present weights."""

    limit: int = 0

    class Out(NamedTuple):
        fresh: Sample[float]

    def max_staleness(self) -> float:
        return self.limit

    def run(self, score: Sample[float]) -> Out:
        return self.Out(score)


class Nucleus(Rollout):
    """A rollout with the usual filters of sampling."""

    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def stub(name: str, cls: str, **settings: Any) -> NodeSetup:
    """One of the nodes above as a worker needs it, every port that it must have under its own name."""
    ref = NodeRef(f"stub_nodes:{cls}", "stub_nodes", cls)
    made = ref.load()
    keys = {key: settings.pop(key) for key in ("on_error", "timeout", "model") if key in settings}
    reads = {name: (name,) for name, port in made.input_ports.items() if not port.optional}
    writes = {port: port for port in made.output_ports}
    return NodeSetup(
        name, ref, settings, keys.get("model"), reads, writes, (tuple(writes),) * bool(writes),
        keys.get("on_error", "fail"), keys.get("timeout"),
    )  # fmt: skip


def document(nodes: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """A document with these nodes; `use: Mix` stands for the one in this module."""
    return {
        "flowrl": 1,
        "name": "stub",
        "data": {"train": {"type": "arithmetic", "size": 64}},
        "batch": {"prompts": 4, "group": 2},
        "nodes": {
            name: {
                **node,
                "use": node["use"] if "." in node["use"] or ":" in node["use"] else f"stub_nodes:{node['use']}",
            }
            for name, node in nodes.items()
        },
        **sections,
    }
