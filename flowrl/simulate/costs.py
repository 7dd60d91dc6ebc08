"""What everything takes: seconds by node, the speed of generation, and how long responses are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SPREAD = 0.8
"""Standard deviation of the logarithm of a response's length, where no run tells: its longest tenth has three times
the tokens of its median."""


@dataclass(frozen=True)
class Response:
    """The responses to one prompt, as an engine sees them."""

    steps: float
    """Decoding steps until the last of them has ended: tokens of the longest one."""
    width: float
    """How many of them are decoded at a time, on average over those steps."""

    @property
    def tokens(self) -> float:
        """Of all of them."""
        return self.steps * self.width


@dataclass(frozen=True)
class Drawn:
    """Lengths of a log-normal distribution, cut where a response may not be longer."""

    mean: float
    limit: int
    group: int

    def response(self, random: np.random.Generator) -> Response:
        """The responses to a prompt."""
        lengths = random.lognormal(math.log(self.mean) - SPREAD**2 / 2, SPREAD, self.group).clip(1, self.limit).round()
        return Response(float(lengths.max()), float(lengths.sum() / lengths.max()))

    def __str__(self) -> str:
        return f"log-normal, {self.mean:g} tokens on average before the cut at {self.limit:,}"


@dataclass(frozen=True)
class Observed:
    """Those of a run, drawn with replacement."""

    responses: tuple[Response, ...]

    def response(self, random: np.random.Generator) -> Response:
        """The responses to a prompt."""
        return self.responses[int(random.integers(len(self.responses)))]

    def __str__(self) -> str:
        return f"as those of {len(self.responses):,} prompts of the run"


@dataclass(frozen=True)
class Decoding:
    """What generation takes on one worker, or on the workers that one copy of the model is split over."""

    lengths: Drawn | Observed
    step_seconds: float
    """Of a decoding step, however many sequences it has."""
    sequence_seconds: float = 0.0
    """Of a decoding step, for each sequence more."""
    prefix_seconds: float = 0.0
    """For each token of a prompt, and of what is read again after a pause."""
    prompt_tokens: float = 0.0
    max_groups: float = math.inf
    """Groups that are decoded at a time."""
    one_call_a_step: bool = False
    """Whether calls that run side by side take turns with the model, in place of sharing its steps."""

    def tokens_per_second(self, num_sequences: float) -> float:
        """Of so many sequences together."""
        return num_sequences / (self.step_seconds + num_sequences * self.sequence_seconds)


@dataclass(frozen=True)
class Costs:
    """Everything that a simulation must be told about time."""

    source: str
    """Where it is from, for people."""
    group_seconds: Mapping[str, float]
    """By node that does not generate: of one group on one worker; ranks share the work of those that use a model."""
    decoding: Mapping[str, Decoding]
    """By node that generates."""
    sync_seconds: Mapping[str, float]
    """By sync node: of the weights to all engines."""
    call_seconds: float
    """From the moment when a call could start to that when it does."""
    kept: float = 1.0
    """Share of the groups that a gate keeps."""
    notes: tuple[str, ...] = field(default=())
    """What a reader should know."""
