"""What every rollout engine can do; nodes know nothing else of it.

An engine owns a full copy of the weights. Failures are values: a session that could not be generated is an exception in
the place of its completion, and the others go on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from flowrl.node import Context
from flowrl.nodes._backend.chat import Prompt
from flowrl.rows import Array

if TYPE_CHECKING:
    from flowrl.nodes._backend.weights import Bucket, Update


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; the same for all requests of a call."""

    max_tokens: int
    temperature: float
    """0, which only validation asks for, takes the likeliest token each time; log-probabilities are then those at 1."""
    stop: tuple[str, ...] = ()
    """Texts that end a response; the tokens that hold them are part of it."""


@dataclass(frozen=True)
class Request:
    """One prompt and the sessions that start from it."""

    prompt: Sequence[int]
    """Token ids."""
    seeds: Sequence[int]
    """One for each session, in a row of consecutive numbers (`seed_of`): a session's tokens depend on its own seed
    alone, not on who shares the batch."""
    name: str = ""
    """By which `Engine.abort` knows it."""


class Aborted(Exception):
    """In the place of a completion: the session was ended before it had finished."""


@dataclass(frozen=True)
class Completion:
    """One finished session: three arrays with a value per token, its text, and why it ended."""

    ids: Array
    log_probs: Array
    """Of each sampled token, at the sampling temperature; float32."""
    versions: Array
    """The weights that made each token."""
    text: str
    """All its tokens as text, without special ones."""
    finish_reason: str
    """`stop` (the model or a stop text ended it), `length` (out of tokens) or `abort`."""


@dataclass(frozen=True)
class Finished:
    """All sessions of one request have ended, well or badly."""

    request: int
    """Position among the requests of the call."""
    sessions: Sequence[Completion | Exception]


@dataclass(frozen=True)
class Wanted:
    """How an engine wants its weights."""

    dtype: str = ""
    """Type that floats are cast to before they are sent; empty where the engine takes any."""
    transports: tuple[str, ...] = ("shm",)
    """Ways in which it can take them."""
    num_processes: int = 1
    """Processes that hold a part of the model."""
    name: str = ""
    """No other engine has it; only for transports that must tell engines apart."""


class Engine(Protocol):
    """A rollout engine."""

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, as the model expects a user's turn, or the messages of a chat."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        """Requests as they finish, several at a time where they finish together.

        Several threads may call it at once. While the engine sleeps or takes new weights it waits: of a request that
        has begun, the tokens stay as they are, and what comes after them is computed from the new weights alone.
        """

    def abort(self, names: Collection[str]) -> None:
        """End the requests of these names that are being generated: what is unfinished of them becomes `Aborted`."""

    def wants(self) -> Wanted:
        """What the sender of weights must know."""

    def begin_update(self, update: Update) -> None:
        """New weights are coming; until `finish_update` nothing is generated, between two tokens of what is under way.

        Raises `WeightsError` if they cannot fit.

        An engine that sleeps takes back the memory that it needs for them.
        """

    def load_bucket(self, bucket: Bucket) -> None:
        """Take some of them."""

    def finish_update(self, version: int) -> None:
        """All have come: generate with them from now on. Raises `WeightsError` if one is missing or is another."""

    def version(self) -> int:
        """Version of the weights in use."""

    def sleep(self) -> None:
        """Leave the device's memory to others until `wake`; nothing is generated meanwhile, and no request is lost."""

    def wake(self) -> None:
        """Be ready again, with the weights of the last update."""

    def close(self) -> None:
        """End the processes that the engine started."""


def require_whole(broken: bool) -> None:
    """Raises where an engine would generate with weights of which only a part has come, and no more will."""
    if broken:
        raise RuntimeError("the engine holds only a part of its new weights: the last update has not ended")


def refusal(position: int, request: Request, max_length: int) -> Finished | None:
    """A request whose prompt leaves no room for a response, or has nothing to respond to, with the reason."""
    if 0 < len(request.prompt) < max_length:
        return None
    reason = f"has {len(request.prompt)} tokens, the model takes {max_length} with the response"
    error = ValueError(f"the prompt {reason}" if request.prompt else "the prompt is empty")
    return Finished(position, [error] * len(request.seeds))


def seed_of(run_seed: int, uid: str, session: int) -> int:
    """Seed of one session, below 2^63, from nothing but the run's seed and its identity; consecutive in a group."""
    digest = hashlib.blake2b(f"{run_seed}/{uid}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 2) + session


def engines_of(context: Context) -> dict[str, Engine]:
    """The engines of this worker that generate with the context's model, by kind."""
    engines: dict[str, Engine] = context.shared.setdefault(("engines", context.model), {})
    return engines
