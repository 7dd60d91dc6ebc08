"""The tokens that the sessions of a batch have drawn so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from flowrl.nodes._backend.engine import Aborted, Completion, Request
from flowrl.rows import Array

BYTES_PER_CHARACTER = 4
"""Most tokens that one character takes, where each holds one of its bytes."""

Decode = Callable[[list[int]], str]


class Drawn:
    """The tokens that the S sessions of some requests have drawn so far, and which have ended."""

    def __init__(self, requests: Sequence[Request], limits: Array) -> None:
        """`limits` (R,) are the most tokens of a session of each request."""
        num_sessions = np.array([len(request.seeds) for request in requests])
        self.request = np.repeat(np.arange(len(requests)), num_sessions)
        # A stream of its own for each session: who else is in the batch changes nothing.
        streams = [np.random.Generator(np.random.Philox(key=seed)) for request in requests for seed in request.seeds]
        self.uniform = np.stack([stream.random(int(limits.max())) for stream in streams])
        self.ids = np.zeros(self.uniform.shape, dtype=np.int64)
        self.active = np.arange(len(self.request))
        """(A,) sessions that have not ended, ascending; all have drawn equally many tokens."""
        self.num_drawn = 0
        self._limit, self._num_open = limits[self.request], num_sessions
        self._name = np.array([request.name for request in requests])[self.request]
        self._log_probs = np.zeros(self.uniform.shape, dtype=np.float32)
        self._versions = np.zeros(self.uniform.shape, dtype=np.int64)
        self._length = np.zeros(len(self.request), dtype=np.int64)
        self._reason = np.full(len(self.request), "length")

    @property
    def so_far(self) -> Array:
        """(A, drawn) token ids of the active sessions."""
        return self.ids[self.active, : self.num_drawn]

    def add(self, ids: Array, log_probs: Array, version: int, stopped: Array) -> list[int]:
        """A token (A,) for every active session, and which of them it ends; the requests that have ended with it."""
        now = (self.active, self.num_drawn)
        self.ids[now], self._log_probs[now], self._versions[now] = ids, log_probs, version
        self.num_drawn += 1
        self._reason[self.active[stopped]] = "stop"
        return self._end(stopped | (self.num_drawn >= self._limit[self.active]))

    def abort(self, names: Collection[str]) -> list[int]:
        """End the active sessions of these requests; those that have ended with it."""
        if not names:
            return []
        aborted = np.isin(self._name[self.active], list(names))
        self._reason[self.active[aborted]] = "abort"
        return self._end(aborted)

    def _end(self, ended: Array) -> list[int]:
        sessions = self.active[ended]
        self._length[sessions] = self.num_drawn
        self.active = self.active[~ended]
        self._num_open -= np.bincount(self.request[sessions], minlength=len(self._num_open))
        touched = np.unique(self.request[sessions])
        done: list[int] = touched[self._num_open[touched] == 0].tolist()
        return done

    def texts_end(self, ids: Array, stop: Sequence[str], decode: Decode) -> Array:
        """Which of the active sessions (A,) hold a stop text that these tokens (A,), not added yet, complete."""
        if not stop:
            return np.zeros(len(ids), dtype=np.bool_)
        first = max(0, self.num_drawn - BYTES_PER_CHARACTER * max(map(len, stop)))
        tails = np.column_stack([self.ids[self.active, first : self.num_drawn], ids])
        texts = (decode(tail.tolist()) for tail in tails)
        return np.array([any(text in tail for text in stop) for tail in texts], dtype=np.bool_)

    def sessions(self, request: int, decode: Decode) -> list[Completion | Exception]:
        """What the sessions of an ended request have drawn."""
        return [self._completion(session, decode) for session in np.flatnonzero(self.request == request).tolist()]

    def _completion(self, session: int, decode: Decode) -> Completion | Exception:
        reason, drawn = str(self._reason[session]), slice(0, int(self._length[session]))
        if reason == "abort":
            return Aborted(f"after {self._length[session]} tokens")
        ids, log_probs = self.ids[session, drawn], self._log_probs[session, drawn]
        return Completion(ids, log_probs, self._versions[session, drawn], decode(ids.tolist()), reason)
