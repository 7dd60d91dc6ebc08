"""What every rollout engine can do; nodes know nothing else of it.

An engine owns a full copy of the weights. Failures are values: a session that could not be generated is an exception in
the place of its completion, and the others go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flowrl.node import Context
from flowrl.rows import Array


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the same for all requests of a call."""

    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Request:
    """One prompt and the sessions that start from it."""

    prompt: Sequence[int]
    """Token ids."""
    seeds: Sequence[int]
    """One for each session: a session's tokens depend on its own seed alone, not on who shares the batch."""


@dataclass(frozen=True)
class Completion:
    """One finished session: three arrays with a value per token, its text, and why it ended."""

    ids: Array
    log_probs: Array
    """Of each sampled token, at the sampling temperature; float32."""
    versions: Array
    """The weights that made each token."""
    text: str
    """Without special tokens."""
    finish_reason: str
    """`stop` (the model ended it), `length` (out of tokens) or `abort`."""


@dataclass(frozen=True)
class Finished:
    """All sessions of one request have ended, well or badly."""

    request: int
    """Position among the requests of the call."""
    sessions: Sequence[Completion | Exception]


class Engine(Protocol):
    """A rollout engine."""

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, as the model expects a user's turn."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        """Requests as they finish, several at a time where they finish together."""

    def update_weights(self, weights: Any, version: int) -> None:
        """Generate with these weights (`_backend.weights.Weights`) from now on."""

    def version(self) -> int:
        """Version of the weights in use."""


def seed_of(run_seed: int, uid: str, session: int) -> int:
    """64-bit seed of one session, from nothing but the run's seed and its identity."""
    digest = hashlib.blake2b(f"{run_seed}/{uid}/{session}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def engines_of(context: Context) -> dict[str, Engine]:
    """The engines of this worker that generate with the context's model, by kind."""
    engines: dict[str, Engine] = context.shared.setdefault(("engines", context.model), {})
    return engines
