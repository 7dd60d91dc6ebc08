"""The `fake` engine: scripted texts, failures and latencies, always the same, without a model.

It runs the real graph, store and schedules in seconds. A token is a byte of the text, then one token that ends it. The
tokens of a session are spread evenly over its time, which stands still while the engine sleeps or takes new weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from flowrl.model_files import words_of
from flowrl.nodes._backend.chat import Prompt
from flowrl.nodes._backend.engine import Aborted, Completion, Finished, Request, Sampling, Wanted
from flowrl.nodes._backend.script import Script, Session
from flowrl.nodes._backend.turns import ASLEEP, UPDATING, Running, Turns

if TYPE_CHECKING:
    from flowrl.nodes._backend.weights import Bucket, Update

END = 0
"""The token that ends a response."""
NUM_TOKENS = 257
"""One for each byte, and that one."""


class _Moment(NamedTuple):
    """When a call began, in the engine's time, the version of the weights then, and how many updates it had had."""

    time: float
    version: int
    num_updates: int


class FakeEngine:
    """See the module docstring; implements `_backend.engine.Engine`."""

    def __init__(self, script: Script, model: str = "") -> None:
        """`model` is the path of the one that may read the tokens."""
        self._script, self._version = script, 0
        self._vocabulary = script.vocabulary or min(NUM_TOKENS, words_of(model) or NUM_TOKENS)
        self._turns = Turns()
        self._stood_still, self._stopped_at = 0.0, math.inf
        self._updates: list[tuple[float, int]] = []
        """When each update ended, in the engine's time, and its version."""
        self._asked: set[int] = set()

    def version(self) -> int:
        """Version of the weights that it was last given."""
        return self._version

    def wants(self) -> Wanted:
        """Weights of any type, for it looks at none."""
        return Wanted()

    def begin_update(self, update: Update) -> None:
        """Let its time stand still until the end of the update."""
        self._stop(UPDATING)

    def load_bucket(self, bucket: Bucket) -> None:
        """It has no weights."""
        assert UPDATING in self._turns.stopped, "an update begins first"

    def finish_update(self, version: int) -> None:
        """Take note of the version."""
        with self._turns.changed:
            self._version = version
            self._updates.append((self._now(), version))
        self._go(UPDATING)

    def sleep(self) -> None:
        """Let its time stand still until `wake`."""
        self._stop(ASLEEP)

    def wake(self) -> None:
        """Go on."""
        self._go(ASLEEP)

    def abort(self, names: Collection[str]) -> None:
        """End requests now."""
        self._turns.abort(names)

    def close(self) -> None:
        """Nothing to end."""

    def _moment(self) -> _Moment:
        with self._turns.changed:
            return _Moment(self._now(), self._version, len(self._updates))

    def _now(self) -> float:
        """Seconds that it was neither asleep nor updated."""
        return min(time.monotonic(), self._stopped_at) - self._stood_still

    def _stop(self, why: str) -> None:
        with self._turns.changed:
            self._stopped_at = min(self._stopped_at, time.monotonic())
            self._turns.stop(why)

    def _go(self, why: str) -> None:
        with self._turns.changed:
            self._turns.go(why)
            if not self._turns.stopped and self._stopped_at < math.inf:
                self._stood_still += time.monotonic() - self._stopped_at
                self._stopped_at = math.inf

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The bytes of each prompt; of messages, those of what they say."""
        texts = (p if isinstance(p, str) else "\n".join(str(turn["content"]) for turn in p) for p in prompts)
        return [self._tokens(text) for text in texts]

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        """Requests in the order of their scripted times."""
        with self._turns.running(requests) as call:
            begun, sessions = self._moment(), self._sessions(requests, sampling)
            due = {position: begun.time + max(each.seconds for each in sessions[position]) for position in sessions}
            while due:
                now = math.nan if self._turns.stopped else self._now()
                ended = [p for p, time in due.items() if time <= now or requests[p].name in call.aborted]
                if not ended:
                    self._wait(call, min(due.values()))
                for position in sorted(ended, key=due.__getitem__):
                    del due[position]
                    results = (self._result(each, begun, sampling) for each in sessions[position])
                    yield [Finished(position, list(results))]

    def _wait(self, call: Running, until: float) -> None:
        """Until that moment of its time, or until something is aborted; while it is stopped in any case."""
        with self._turns.changed:
            while not self._turns.is_aborted(call) and (self._turns.stopped or self._now() < until):
                rest = until - self._now()
                self._turns.changed.wait(None if self._turns.stopped or math.isinf(rest) else rest)
            call.num_heeded = len(call.aborted)

    def _sessions(self, requests: Sequence[Request], sampling: Sampling) -> dict[int, list[Session]]:
        found = {}
        for position, request in enumerate(requests):
            is_first = request.seeds[0] not in self._asked
            found[position] = self._script.sessions(position, request.seeds, sampling.max_tokens, is_first)
            self._asked.add(request.seeds[0])
        return found

    def _result(self, session: Session, begun: _Moment, sampling: Sampling) -> Completion | Exception:
        if begun.time + session.seconds > self._now():
            return Aborted("the script had not come to its end")
        if session.text is None:
            return RuntimeError("the script says that this session fails")
        ids = np.array([*self._tokens(session.text), END][: sampling.max_tokens], dtype=np.int64)
        log_probs = np.full(len(ids), -np.log(self._vocabulary), dtype=np.float32)
        made = begun.time + session.seconds * np.arange(1, len(ids) + 1) / len(ids)
        versions = np.full(len(ids), begun.version)
        for moment, version in self._updates[begun.num_updates :]:
            versions[(made > moment) | (begun.time >= moment)] = version
        written = session.text.encode()[: sampling.max_tokens].decode(errors="ignore")
        return Completion(ids, log_probs, versions, written, "stop" if ids[-1] == END else "length")

    def _tokens(self, text: str) -> list[int]:
        return [1 + byte % (self._vocabulary - 1) for byte in text.encode()]
