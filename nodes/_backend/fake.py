"""The `fake` engine: scripted texts, failures and latencies, always the same, without a model.

It runs the real graph, store and schedules in seconds. A token is a byte of the text, then one token that ends it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from flowrl.model import Settings
from flowrl.model_files import words_of
from flowrl.nodes._backend.chat import Prompt
from flowrl.nodes._backend.engine import Completion, Finished, Idle, Request, Sampling, Wanted, require_ready

if TYPE_CHECKING:
    from flowrl.nodes._backend.weights import Bucket, Update

END = 0
"""The token that ends a response."""
NUM_TOKENS = 257
"""One for each byte, and that one."""


class Script(Settings):
    """What the fake engine answers."""

    texts: list[str | None] = Field(["0", "1"], min_length=1)
    """Session s of every prompt answers with text s, over again when they run out; null is a session that fails."""
    seconds: list[float] = Field([0.0], min_length=1)
    """Prompt p of a call is answered that long after the call's start, over again when they run out."""
    vocabulary: int | None = Field(None, ge=2)
    """Token ids lie below this; null is 257, or as many words as a smaller model on this machine knows."""


class FakeEngine(Idle):
    """See the module docstring; implements `_backend.engine.Engine`."""

    def __init__(self, script: Script, model: str = "") -> None:
        """`model` is the path of the one that may read the tokens."""
        self._script, self._version = script, 0
        self._vocabulary = script.vocabulary or min(NUM_TOKENS, words_of(model) or NUM_TOKENS)
        self._updating = self._asleep = False

    def version(self) -> int:
        """Version of the weights that it was last given."""
        return self._version

    def wants(self) -> Wanted:
        """Weights of any type, for it looks at none."""
        return Wanted()

    def begin_update(self, update: Update) -> None:
        """Generate nothing until the end of the update."""
        self._updating = True

    def load_bucket(self, bucket: Bucket) -> None:
        """It has no weights."""
        assert self._updating, "an update begins first"

    def finish_update(self, version: int) -> None:
        """Take note of the version."""
        self._updating, self._version = False, version

    def sleep(self) -> None:
        """Generate nothing until `wake`."""
        self._asleep = True

    def wake(self) -> None:
        """Be ready again."""
        self._asleep = False

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The bytes of each prompt; of messages, those of what they say."""
        texts = (p if isinstance(p, str) else "\n".join(str(turn["content"]) for turn in p) for p in prompts)
        return [self._tokens(text) for text in texts]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        """Requests in the order of their scripted times."""
        require_ready(self._updating, self._asleep)
        start = time.monotonic()
        seconds = [self._script.seconds[position % len(self._script.seconds)] for position in range(len(requests))]
        for position in np.argsort(seconds, kind="stable").tolist():
            time.sleep(max(0.0, start + seconds[position] - time.monotonic()))
            sessions = [self._session(session, sampling) for session in range(len(requests[position].seeds))]
            yield [Finished(position, sessions)]

    def _session(self, session: int, sampling: Sampling) -> Completion | Exception:
        text = self._script.texts[session % len(self._script.texts)]
        if text is None:
            return RuntimeError("the script says that this session fails")
        ids = np.array([*self._tokens(text), END][: sampling.max_tokens], dtype=np.int64)
        log_probs = np.full(len(ids), -np.log(self._vocabulary), dtype=np.float32)
        versions = np.full(len(ids), self._version)
        written = text.encode()[: sampling.max_tokens].decode(errors="ignore")
        return Completion(ids, log_probs, versions, written, "stop" if ids[-1] == END else "length")

    def _tokens(self, text: str) -> list[int]:
        return [1 + byte % (self._vocabulary - 1) for byte in text.encode()]
