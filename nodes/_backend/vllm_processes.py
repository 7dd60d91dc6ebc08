"""vLLM's processes: their environment while they start, their death, and the memory that they share."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import psutil
from vllm.v1.engine.async_llm import AsyncLLM

from flowrl.engine.sweeper import shared_memory

T = TypeVar("T")
ALIVE_SECONDS = 1.0
"""How often it is asked whether vLLM's processes are still there."""


@contextmanager
def in_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """What is started inside finds this in its environment; afterwards all is as before, also what vLLM has set."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


async def while_alive(llm: AsyncLLM, work: Awaitable[T]) -> T:
    """The result; vLLM itself waits for ever for an answer of processes that have died."""
    task = asyncio.ensure_future(work)
    while not (await asyncio.wait([task], timeout=ALIVE_SECONDS))[0]:
        if llm.errored:
            task.cancel()
            raise RuntimeError("vLLM's processes have died")
    return task.result()


def forget_shared_memory() -> None:
    """Take the names from the memory that this process and its descendants hold; call it when all have attached.

    Python's shared memory is a file in /dev/shm, hundreds of megabytes for an engine. Who is killed leaves it behind,
    as every worker is at the end of a run. A file without a name lives as long as the processes that hold it.
    """
    process = psutil.Process()
    for each in (process, *process.children(recursive=True)):
        for path in shared_memory(each.pid):
            path.unlink(missing_ok=True)
