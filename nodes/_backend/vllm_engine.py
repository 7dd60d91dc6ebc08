"""The `vllm` engine: vLLM's AsyncLLM in the worker, its model in processes of its own.

Token ids go in and come out. AsyncLLM lives on an event loop in a thread; the worker's calls are carried there. While
nothing generates the scheduler is paused, so that all requests of a call are there before the first is scheduled: what
is batched with what, and with it the last bits of every logit, then follows from the requests alone. Further calls join
the one that runs. Sleep and updates pause the scheduler too, and keep what it has.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from flowrl.model import ModelSpec
from flowrl.nodes._backend.chat import ChatFormat, Prompt, encode_prompts
from flowrl.nodes._backend.engine import Finished, Request, Sampling, Wanted, refusal, require_whole
from flowrl.nodes._backend.models import end_tokens, load_tokenizer
from flowrl.nodes._backend.turns import UPDATING
from flowrl.nodes._backend.vllm_calls import Call, Calls, Scheduler
from flowrl.nodes._backend.vllm_processes import forget_shared_memory, in_environment, while_alive
from flowrl.nodes._backend.vllm_requests import session_of
from flowrl.nodes._backend.vllm_sync import VllmUpdate
from flowrl.nodes._backend.weights import Bucket, Update

T = TypeVar("T")
END_SECONDS = 10.0
"""Most time for a call that was broken off to be put away."""


class VllmEngine:
    """See the module docstring; implements `_backend.engine.Engine`."""

    def __init__(
        self, spec: ModelSpec, arguments: Mapping[str, Any], environment: Mapping[str, str], chat: ChatFormat
    ) -> None:
        """`arguments` are those of vLLM's `AsyncEngineArgs`; `environment` is that of its processes."""
        self._tokenizer, self._chat = load_tokenizer(spec), chat
        self._one_at_a_time = threading.Lock()  # a tokenizer is not made for several threads
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        with in_environment(environment):
            self._llm = self.call(_start(AsyncEngineArgs(**arguments)))
        forget_shared_memory()
        config = self._llm.model_config
        self._can_sleep = bool(config.enable_sleep_mode)
        self._max_length = int(config.max_model_len)
        ends = (getattr(config.hf_text_config, "eos_token_id", None), self._tokenizer.eos_token_id)
        self._end_tokens = end_tokens(config.try_get_generation_config().get("eos_token_id"), *ends)
        self._update, self._version, self._broken = VllmUpdate(self._llm, self._ask), 0, False
        self._scheduler = Scheduler(self._llm)
        self._calls = Calls(self._llm, self._scheduler, self._max_length, self._end_tokens)
        self._soon(self._scheduler.settle())

    def version(self) -> int:
        """Version of the weights in use; 0 before the first update."""
        return self._version

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of each prompt, through the chat template where the tokenizer has one."""
        with self._one_at_a_time:
            return encode_prompts(self._tokenizer, prompts, self._chat)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[list[Finished]]:
        """Requests as they finish; those that end while the last ones are looked at come together."""
        require_whole(self._broken)
        refused = [refusal(position, request, self._max_length) for position, request in enumerate(requests)]
        if any(refused):
            yield [each for each in refused if each is not None]
        todo = {position: requests[position] for position, each in enumerate(refused) if each is None}
        if not todo:
            return
        call = Call(dict(todo), sampling)
        work = self._soon(self._calls.run(call))
        try:
            while todo:
                news = [call.done.get()]
                while not call.done.empty():
                    news.append(call.done.get())
                yield [self._finished(each, todo) for each in news]
        finally:
            if todo:  # nobody waits for the others any more
                work.cancel()
            call.ended.wait(END_SECONDS)  # what was broken off must not run beside the next call

    def wants(self) -> Wanted:
        """The type of the model's weights, and the ways to its processes."""
        return self._update.wants()

    def begin_update(self, update: Update) -> None:
        """New weights are coming; of one that sleeps, their memory wakes."""
        self._ask(self._scheduler.stop(UPDATING))
        with self._whole_or_broken():
            self._update.begin(update)

    def load_bucket(self, bucket: Bucket) -> None:
        """Take some of them."""
        with self._whole_or_broken():
            self._update.load(bucket)

    def finish_update(self, version: int) -> None:
        """Generate with them from now on; what the old ones had computed is forgotten."""
        with self._whole_or_broken():
            self._update.finish(version)
        self._version, self._broken = version, False
        self._ask(self._scheduler.go(UPDATING))

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        """A part of an update: what goes wrong in it ends every call, unless the old weights are still there."""
        try:
            yield
        except BaseException as error:
            self._broken = not self._update.is_whole
            self.call(self._calls.fail(error) if self._broken else self._scheduler.go(UPDATING))
            raise

    def sleep(self) -> None:
        """Give the device's memory back: the weights go to the host, keys and values are dropped."""
        self._ask(self._scheduler.sleep(self._can_sleep))

    def wake(self) -> None:
        """Take the memory again, with the weights that it had or was given since."""
        self._ask(self._scheduler.wake())

    def abort(self, names: Collection[str]) -> None:
        """End requests, whether they run, wait for room, or are being submitted."""
        self.call(self._calls.abort(names))

    def close(self) -> None:
        """End vLLM's processes."""
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it."""
        return self._soon(work).result()

    def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        return self.call(while_alive(self._llm, work))

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _end(self) -> None:
        await asyncio.wait([asyncio.create_task(self._scheduler.settle())], timeout=1.0)
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()  # it would take the end of the processes for their death
        self._llm.shutdown(timeout=0)  # an orderly end takes vLLM six seconds, and there is nothing to save

    def _finished(self, news: tuple[int, Any] | BaseException, todo: dict[int, Request]) -> Finished:
        if isinstance(news, BaseException):
            raise RuntimeError(f"vLLM stopped: {news or type(news).__name__}") from news
        position, result = news
        request = todo.pop(position)
        if isinstance(result, Exception):
            return Finished(position, [result] * len(request.seeds))
        ids = [list(each.token_ids) for each in result]
        with self._one_at_a_time:
            texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        sessions = [session_of(each, text) for each, text in zip(result, texts, strict=True)]
        return Finished(position, sessions * (len(request.seeds) // len(sessions)))


async def _start(arguments: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(arguments)
