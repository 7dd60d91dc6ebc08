"""The `transformers` engine: generation in the worker, on a copy of the weights of its own.

Calls of several threads take turns with the model, a token at a time. Between two tokens the engine can sleep or take
new weights: what the model had read of a session is then read again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from flowrl.model import ModelSpec
from flowrl.nodes._backend.chat import ChatFormat, Prompt, encode_prompts
from flowrl.nodes._backend.drawn import Drawn
from flowrl.nodes._backend.engine import Finished, Request, Sampling, Wanted, refusal
from flowrl.nodes._backend.loading import Loading
from flowrl.nodes._backend.models import end_tokens, load_model, load_tokenizer
from flowrl.nodes._backend.prefix import Reader, sample
from flowrl.nodes._backend.turns import ASLEEP, UPDATING, Running, Turns
from flowrl.nodes._backend.weights import Bucket, Update, name_of
from flowrl.rows import Jagged


class TransformersEngine:
    """See the module docstring; implements `_backend.engine.Engine`."""

    def __init__(self, spec: ModelSpec, device: str, chat: ChatFormat, max_sequences: int) -> None:
        self._model = load_model(spec, device)
        self._tokenizer, self._chat = load_tokenizer(spec), chat
        self._one_at_a_time = threading.Lock()  # a tokenizer is not made for several threads
        self._device, self._max_sequences, self._version = device, max_sequences, 0
        self._turns = Turns()
        self._readers: set[Reader] = set()
        self._loading: Loading | None = None
        config = self._model.config.get_text_config()
        sources = (self._model.generation_config, config, self._tokenizer)
        self._end_tokens = end_tokens(*(getattr(source, "eos_token_id", None) for source in sources))
        limit = getattr(config, "max_position_embeddings", None)
        self._max_length = int(limit or np.iinfo(np.int64).max)

    def version(self) -> int:
        """Version of the weights in use; 0 before the first update."""
        return self._version

    def wants(self) -> Wanted:
        """Weights of its own type."""
        return Wanted(name_of(self._model.dtype))

    def begin_update(self, update: Update) -> None:
        """Stop between two tokens, and see whether the weights will fit."""
        self._stop(UPDATING)
        try:
            self._loading = Loading(self._model, update.manifest)
        except BaseException:
            self._turns.go(UPDATING)  # with the old ones
            raise

    def load_bucket(self, bucket: Bucket) -> None:
        """Copy the weights in."""
        assert self._loading is not None, "an update begins first"
        with self._turns.whole_or_broken():
            self._loading.load(bucket)

    def finish_update(self, version: int) -> None:
        """Compare checksums where the sender made some, and generate with the new weights."""
        assert self._loading is not None, "an update begins first"
        with self._turns.whole_or_broken():
            self._loading.finish()
        self._loading, self._version = None, version
        self._turns.updated()

    def sleep(self) -> None:
        """Stop between two tokens; keys and values are dropped."""
        self._stop(ASLEEP)

    def wake(self) -> None:
        """Go on."""
        self._turns.go(ASLEEP)

    def _stop(self, why: str) -> None:
        self._turns.stop(why)
        for reader in list(self._readers):
            reader.forget()

    def abort(self, names: Collection[str]) -> None:
        """End requests before their next token."""
        self._turns.abort(names)

    def close(self) -> None:
        """Nothing to end."""

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, through the chat template where the tokenizer has one."""
        with self._one_at_a_time:
            return encode_prompts(self._tokenizer, prompts, self._chat)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        """Requests as they finish; of a call at most `max_sequences` sessions (or one request) at a time."""
        wave: list[int] = []
        num_sessions = 0
        with self._turns.running(requests) as call:
            for position, request in enumerate(requests):
                if refused := refusal(position, request, self._max_length):
                    yield [refused]
                    continue
                if wave and num_sessions + len(request.seeds) > self._max_sequences:
                    yield from self._generate(call, wave, requests, sampling)
                    wave, num_sessions = [], 0
                wave.append(position)
                num_sessions += len(request.seeds)
            if wave:
                yield from self._generate(call, wave, requests, sampling)

    def _generate(
        self, call: Running, wave: Sequence[int], requests: Sequence[Request], sampling: Sampling
    ) -> Iterator[list[Finished]]:
        prompts = Jagged.of([requests[position].prompt for position in wave], np.int64)
        limits = np.minimum(sampling.max_tokens, self._max_length - prompts.lengths)
        drawn = Drawn([requests[position] for position in wave], limits)
        reader = Reader(self._model, self._device, prompts, drawn)
        self._readers.add(reader)
        try:
            while len(drawn.active):
                ended = drawn.abort(call.aborted)
                if not ended:
                    with self._turns.turn(call) as granted:
                        ended = self._draw(reader, drawn, sampling) if granted else []
                yield [Finished(wave[request], drawn.sessions(request, self._decode)) for request in ended]
        finally:
            self._readers.discard(reader)

    def _draw(self, reader: Reader, drawn: Drawn, sampling: Sampling) -> list[int]:
        """A token for every active session; the requests that have ended with it."""
        logits, branch = reader.next_logits()
        uniform = drawn.uniform[drawn.active, drawn.num_drawn]
        ids, log_probs = sample(logits, branch, uniform, sampling.temperature)
        stopped = np.isin(ids, self._end_tokens) | drawn.texts_end(ids, sampling.stop, self._decode)
        return drawn.add(ids, log_probs, self._version, stopped)

    def _decode(self, ids: list[int]) -> str:
        with self._one_at_a_time:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
