"""Calls on vLLM's event loop: its scheduler runs while one of them generates and nothing stops it."""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from flowrl.nodes._backend.engine import Request, Sampling
from flowrl.nodes._backend.turns import ASLEEP
from flowrl.nodes._backend.vllm_processes import while_alive
from flowrl.nodes._backend.vllm_requests import params_of


class Scheduler:
    """vLLM's scheduler: paused in mode `keep`, where requests wait and new ones may come."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._num_calls = 0
        self._stopped: set[str] = set()
        self._runs, self._has_given_memory = True, False
        self._one_at_a_time = asyncio.Lock()
        self._last: asyncio.Task[None] | None = None

    async def settle(self) -> None:
        """Let it run or pause, as it should; returns when it does."""
        async with self._one_at_a_time:
            should_run = self._num_calls > 0 and not self._stopped
            if should_run and not self._runs:
                await while_alive(self._llm, self._llm.resume_generation())
            elif self._runs and not should_run:
                await while_alive(self._llm, self._llm.pause_generation(mode="keep", clear_cache=False))
            self._runs = should_run

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """A call generates."""
        self._num_calls += 1
        try:
            await self.settle()
            yield
        finally:
            self._num_calls -= 1
            # Not awaited: a pause takes 20 ms, and whoever needs it waits for it.
            self._last = asyncio.create_task(self.settle())
            self._last.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def stop(self, why: str) -> None:
        """Pause between two tokens, until `go`."""
        self._stopped.add(why)
        await self.settle()

    async def go(self, why: str) -> None:
        """Go on, unless something else stops it."""
        self._stopped.discard(why)
        await self.settle()

    async def sleep(self, gives_memory: bool) -> None:
        """Pause, and give the device's memory back where that is wanted: keys and values are dropped."""
        await self.stop(ASLEEP)
        if gives_memory and not self._has_given_memory:
            await self._llm.sleep(level=1, mode="keep")
            self._has_given_memory = True

    async def wake(self) -> None:
        """Take the memory again and go on."""
        if self._has_given_memory:
            async with self._one_at_a_time:
                await self._llm.wake_up()
                self._has_given_memory, self._runs = False, True  # vLLM itself lets the scheduler run
        await self.go(ASLEEP)


class Call:
    """One call that generates."""

    def __init__(self, todo: Mapping[int, Request], sampling: Sampling) -> None:
        self.todo, self.sampling = todo, sampling
        self.done: queue.SimpleQueue[tuple[int, Any] | BaseException] = queue.SimpleQueue()
        """What has become of each request: its position, and its sessions or why there are none."""
        self.ended = threading.Event()
        self.submitted: list[tuple[str, str]] = []
        """The name of each request that vLLM has, and the name that it has there."""
        self.aborted: set[str] = set()


class Calls:
    """Those that run."""

    def __init__(self, llm: AsyncLLM, scheduler: Scheduler, max_length: int, end_tokens: Sequence[int]) -> None:
        self._llm, self._scheduler, self._max_length, self._end_tokens = llm, scheduler, max_length, end_tokens
        self._running: set[Call] = set()
        self._names = itertools.count()

    async def run(self, call: Call) -> None:
        """Submit all requests, then let them run; what becomes of each goes to `done`."""
        self._running.add(call)
        try:
            await self._scheduler.settle()  # the first call's are all there before one starts
            results = [await self._submit(call, position, request) for position, request in call.todo.items()]
            async with self._scheduler.serving():
                await asyncio.gather(*(result for result in results if result is not None))
        except BaseException as error:
            call.done.put(error)
            await self._llm.abort([own for _, own in call.submitted])
        finally:
            self._running.discard(call)
            call.ended.set()

    async def _submit(self, call: Call, position: int, request: Request) -> asyncio.Task[None] | None:
        own = f"r{next(self._names)}"
        try:
            params = params_of(request, call.sampling, self._max_length, self._end_tokens)
            collector = await self._llm.add_request(own, tokens_input(list(request.prompt)), params)
        except EngineDeadError:
            raise
        except Exception as error:  # of this request: it does not fit, or holds what is no token
            call.done.put((position, error))
            return None
        call.submitted.append((request.name, own))
        if request.name in call.aborted:
            await self._llm.abort(own)
        return asyncio.create_task(_result(position, collector, call.done))

    async def abort(self, names: Collection[str]) -> None:
        """End the requests of these names, also of calls that are still submitting theirs."""
        for call in self._running:
            call.aborted |= {request.name for request in call.todo.values()}.intersection(names)
        await self._llm.abort([own for call in self._running for name, own in call.submitted if name in names])

    async def fail(self, error: BaseException) -> None:
        """End all of them with an error."""
        for call in self._running:
            call.done.put(error)


async def _result(position: int, collector: Any, done: queue.SimpleQueue[Any]) -> None:
    """Wait for the sessions of one request."""
    try:
        done.put((position, (await collector.get()).outputs))
    except EngineDeadError:
        raise
    except Exception as error:
        done.put((position, error))
