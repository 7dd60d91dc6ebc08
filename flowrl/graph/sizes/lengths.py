"""What sizes depend on beside the document: how long prompts and responses are, and what nodes call their settings.

Real lengths are known only when run. A dry run assumes that all rows of a rollout have prompts and responses of one
length, and says so beside every number that follows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flowrl.graph.bind import BoundNode
from flowrl.graph.build import Graph
from flowrl.graph.origins import fields_of, origins_of
from flowrl.graph.sizes.architecture import Architecture, Unknown

PROMPT_TOKENS = 256
"""Assumed length of a prompt: with a chat template, word problems such as those of GSM8K have 100 to 300 tokens."""
RESPONSE_TOKENS = 512
"""Assumed length of a response where no rollout says its `max_tokens`."""
BYTES_PER_TOKEN = 4
"""Bytes of text for a token: about right for English with a vocabulary of 30,000 or more."""

MINIBATCH = "minibatch"
"""Of an update: prompts of one optimizer step."""
EPOCHS = "epochs"
"""Of an update: passes over the batch."""
SHUFFLE = "shuffle"
"""Of an update: whether the prompts of a batch are dealt to its mini-batches in another order."""
AFTER_STEP = "after_step"
"""Of an update: the last step of the run in which it does nothing yet."""
MAX_TOKENS_PER_MICROBATCH = "max_tokens_per_microbatch"
"""Of an update or of a reader of weights: padded tokens of one forward pass."""
MAX_TOKENS = "max_tokens"
"""Of a rollout: longest response."""
MAX_SEQUENCES = "max_sequences"
"""Of a rollout: sessions generated at a time, as far as whole groups allow."""
ENGINE = "engine"
"""Of a rollout: what generates; `fake` holds no model."""
ENGINE_OPTIONS = "engine_options"
"""Of a rollout: settings of its engine, of which `dtype` is the type of its weights."""
ENGINE_SETTINGS = (ENGINE, MAX_SEQUENCES, ENGINE_OPTIONS, "tensor_parallel", "chat_template", "template_options")
"""Rollouts of one model in one pool that agree on these share an engine, as those of `rollout.generate` do.

The settings above are a convention: a node class of anybody's that has a parameter of such a name means this by it,
and sizes that depend on a setting that the class does not have are left out."""


def setting(node: BoundNode, name: str) -> int | None:
    """A setting of the convention that is a number above 0; None where the node has none of that name."""
    value = getattr(node.node, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def holds_engine(node: BoundNode) -> bool:
    """Whether the node generates from a copy of the weights of its own."""
    return node.weights == "generates" and getattr(node.node, ENGINE, None) != "fake"


@dataclass(frozen=True)
class Lengths:
    """Tokens that every prompt and every response of a rollout is assumed to have, and why."""

    prompt_tokens: int
    response_tokens: int
    prompt_reason: str = "as given"
    response_reason: str = "as given"
    too_long: str = ""
    """Which model has too few positions for both; empty where none has."""

    @property
    def total(self) -> int:
        """Tokens of a trajectory."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class StepLengths:
    """The lengths of all rows of a step."""

    longest: Lengths
    """Those of the longest rows; all that there is in a pipeline without a rollout."""
    rollouts: Mapping[str, Lengths]
    """Of the rows of each rollout."""
    origins: Mapping[str, Sequence[str]]
    """By node the rollouts whose rows it works on."""
    given: tuple[int | None, int | None] = (None, None)
    """Tokens of a prompt and of a response that were asked for."""

    def of(self, node: str) -> Lengths:
        """The lengths of the rows that a node works on, the longest where it takes those of several rollouts."""
        found = (self.rollouts[name] for name in self.origins.get(node, ()))
        return max(found, key=lambda lengths: lengths.total, default=self.longest)


def assume(
    graph: Graph,
    models: Mapping[str, Architecture | Unknown],
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
) -> StepLengths:
    """The lengths given, and for one that is not: each rollout's own `max_tokens`, and `PROMPT_TOKENS`.

    Where a model that takes the rows has fewer positions than both need, what is not given is cut to fit.
    """
    origins, given = origins_of(graph), (prompt_tokens, response_tokens)
    takers = _takers(graph, origins)
    rollouts = {
        node.name: _lengths(node, _room(takers[node.name], models), *given)
        for node in graph.nodes.values()
        if node.weights == "generates"
    }
    everybody = {model for names in takers.values() for model in names}
    bare = _lengths(None, _room(everybody, models), *given)
    longest = max(rollouts.values(), key=lambda lengths: lengths.total, default=bare)
    return StepLengths(longest, rollouts, origins, given)


def _lengths(
    rollout: BoundNode | None, room: tuple[int, str] | None, prompt_tokens: int | None, response_tokens: int | None
) -> Lengths:
    """The lengths of one rollout's rows; `room` is the fewest positions of a model that takes them, and its name."""
    limit = setting(rollout, MAX_TOKENS) if rollout is not None else None
    response, response_reason = limit or RESPONSE_TOKENS, "assumed"
    if rollout is not None and limit is not None:
        response_reason = f"{MAX_TOKENS} of {rollout.name}"
    prompt, prompt_reason = PROMPT_TOKENS, "assumed"
    if response_tokens is not None:
        response, response_reason = response_tokens, "as given"
    if prompt_tokens is not None:
        prompt, prompt_reason = prompt_tokens, "as given"
    if room is None:
        return Lengths(prompt, response, prompt_reason, response_reason)
    positions, why = room[0], f"{room[1]} has {room[0]:,} positions"
    if prompt_tokens is None and prompt + response > positions:
        prompt, prompt_reason = max(min(prompt, positions - response), positions // 4, 1), why
    if response_tokens is None and prompt + response > positions:
        response, response_reason = max(positions - prompt, 1), why
    too_long = f"more than the {positions:,} positions of {room[1]}" if prompt + response > positions else ""
    return Lengths(prompt, response, prompt_reason, response_reason, too_long)


def _takers(graph: Graph, origins: Mapping[str, Sequence[str]]) -> dict[str, set[str]]:
    """By rollout the models that take its token ids: its own, and that of each node that reads a field per token.

    A judge that reads the text makes tokens of its own, as many as it likes. Under "" are those whose rows come from no
    rollout.
    """
    found: dict[str, set[str]] = {name: set() for name in ("", *origins)}
    for node in graph.nodes.values():
        if node.model is not None and holds_engine(node):
            found[node.name].add(node.model)
    for rollout, node in readers_of_tokens(graph, origins):
        if holds_engine(node) or node.weights != "generates":
            found[rollout].update(node.models)
    return found


def readers_of_tokens(graph: Graph, origins: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, BoundNode]]:
    """Each node that works on models and reads a field per token, with each rollout that its rows come from.

    `origins` are those of the graph. Rows that come from no rollout have "" in its place.
    """
    for node in graph.nodes.values():
        if node.model is None or node.weights not in ("reads", "updates", "generates"):
            continue
        for field in fields_of(node, graph)[1]:
            yield from ((rollout, node) for rollout in origins.get(field.writer, ("",)))


def _room(names: Collection[str], models: Mapping[str, Architecture | Unknown]) -> tuple[int, str] | None:
    """The fewest positions of these models, and whose they are; None where none of them has a limit."""
    known = ((name, models.get(name)) for name in sorted(names))
    limits = [
        (each.max_positions, name) for name, each in known if isinstance(each, Architecture) if each.max_positions
    ]
    return min(limits, default=None)
