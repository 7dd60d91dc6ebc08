"""What sizes depend on beside the document: how long prompts and responses are, and what nodes call their settings.

Real lengths are known only when run. A dry run assumes that all prompts are equally long and all responses too, and
says so beside every number that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flowrl.graph.bind import BoundNode
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
MAX_TOKENS_PER_MICROBATCH = "max_tokens_per_microbatch"
"""Of an update or of a reader of weights: padded tokens of one forward pass."""
MAX_TOKENS = "max_tokens"
"""Of a rollout: longest response."""
MAX_SEQUENCES = "max_sequences"
"""Of a rollout: sessions generated at a time, as far as whole groups allow."""
ENGINE = "engine"
"""Of a rollout: what generates; `fake` holds no model."""
ENGINE_SETTINGS = (ENGINE, MAX_SEQUENCES, "chat_template")
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
    """Tokens that every prompt and every response is assumed to have, and why."""

    prompt_tokens: int
    response_tokens: int
    prompt_reason: str = "as given"
    response_reason: str = "as given"

    @property
    def total(self) -> int:
        """Tokens of a trajectory."""
        return self.prompt_tokens + self.response_tokens


def assume(
    nodes: Iterable[BoundNode],
    models: Mapping[str, Architecture | Unknown],
    prompt_tokens: int | None = None,
    response_tokens: int | None = None,
) -> Lengths:
    """The lengths given, and for one that is not: the rollouts' longest `max_tokens`, and `PROMPT_TOKENS`.

    Where the generating model has fewer positions than both need, what is not given is cut to fit.
    """
    rollouts = [node for node in nodes if node.weights == "generates"]
    limits = {node.name: limit for node in rollouts if (limit := setting(node, MAX_TOKENS)) is not None}
    longest = max(limits, key=lambda name: limits[name], default="")
    response, response_reason = limits.get(longest, RESPONSE_TOKENS), "assumed"
    if longest:
        response_reason = f"{MAX_TOKENS} of {longest}"
    prompt, prompt_reason = PROMPT_TOKENS, "assumed"
    if response_tokens is not None:
        response, response_reason = response_tokens, "as given"
    if prompt_tokens is not None:
        prompt, prompt_reason = prompt_tokens, "as given"
    room = _positions(rollouts, models)
    if room is not None and prompt_tokens is None and prompt + response > room:
        prompt, prompt_reason = max(min(prompt, room - response), room // 4, 1), f"the model has {room} positions"
    if room is not None and response_tokens is None and prompt + response > room:
        response, response_reason = max(room - prompt, 1), f"the model has {room} positions"
    return Lengths(prompt, response, prompt_reason, response_reason)


def _positions(rollouts: Iterable[BoundNode], models: Mapping[str, Architecture | Unknown]) -> int | None:
    """Most tokens of a trajectory that every generating model takes."""
    found = [models.get(node.model or "") for node in rollouts if holds_engine(node)]
    limits = [each.max_positions for each in found if isinstance(each, Architecture) and each.max_positions]
    return min(limits, default=None)
