"""The tokens that the sessions of a batch have drawn so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flowrl.nodes._backend.engine import Completion, Request
from flowrl.rows import Array

BYTES_PER_CHARACTER = 4
"""Most tokens that one character takes, where each holds one of its bytes."""


class Drawn:
    """The tokens that the S sessions of some requests have drawn so far, and which have ended."""

    def __init__(self, requests: Sequence[Request], limits: Array, max_tokens: int) -> None:
        self.num_sessions = np.array([len(request.seeds) for request in requests])
        self.request = np.repeat(np.arange(len(requests)), self.num_sessions)
        self.limit = limits[self.request]
        # A stream of its own for each session: who else is in the batch changes nothing.
        streams = [np.random.Generator(np.random.Philox(key=seed)) for request in requests for seed in request.seeds]
        self.uniform = np.stack([stream.random(max_tokens) for stream in streams])
        self.ids = np.zeros(self.uniform.shape, dtype=np.int64)
        self.log_probs = np.zeros(self.uniform.shape, dtype=np.float32)
        self.versions = np.zeros(self.uniform.shape, dtype=np.int64)
        self.length = np.zeros(len(self.request), dtype=np.int64)
        self.stopped = np.zeros(len(self.request), dtype=np.bool_)

    def texts_end(self, active: Array, step: int, stop: Sequence[str], decode: Callable[[list[int]], str]) -> Array:
        """Which of the active sessions (A,) hold a stop text that the token of this step has completed."""
        if not stop:
            return np.zeros(len(active), dtype=np.bool_)
        first = max(0, step - BYTES_PER_CHARACTER * max(map(len, stop)))
        tails = (decode(ids.tolist()) for ids in self.ids[active, first : step + 1])
        return np.array([any(text in tail for text in stop) for tail in tails], dtype=np.bool_)

    def completion(self, session: int, decode: Callable[[list[int]], str]) -> Completion:
        """What a finished session has drawn."""
        drawn = slice(0, int(self.length[session]))
        ids, log_probs = self.ids[session, drawn], self.log_probs[session, drawn]
        reason = "stop" if self.stopped[session] else "length"
        return Completion(ids, log_probs, self.versions[session, drawn], decode(ids.tolist()), reason)
