"""Nodes of a user whose pipelines are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flowrl import Node, Prompt, PromptToken, Sample, Step, Token
from flowrl.rows import Rows


class Hard(Node):
    """Which prompts are worth a rollout: known before any."""

    class Out(NamedTuple):
        keep: Prompt[bool]

    def run(self, prompt: Prompt[str]) -> Out:
        raise NotImplementedError


class Informative(Node):
    """Which groups have rewards that differ."""

    scope = "group"

    class Out(NamedTuple):
        keep: Prompt[bool]

    def run(self, reward: Sample[float]) -> Out:
        raise NotImplementedError


class OnPolicy(Node):
    """Advantages that are right only for samples of the weights that are trained."""

    scope = "group"

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def max_staleness(self) -> float:
        return 0

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        raise NotImplementedError


class Nucleus(Node):
    """A rollout that leaves the tail of the distribution out."""

    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    top_p: float = 1.0

    class Out(NamedTuple):
        rows: Rows
        prompt_ids: PromptToken[int]
        response_ids: Token[int]
        response_mask: Token[bool]
        response: Sample[str]
        temperature: Step[float]

    def run(self, prompt: Prompt[str]) -> Iterator[Out]:
        raise NotImplementedError
