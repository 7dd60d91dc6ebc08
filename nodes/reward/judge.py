"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field, PrivateAttr, field_validator

from flowrl.batch import Json, Prompt, Sample
from flowrl.node import Context
from flowrl.nodes._backend.answers import CALLS_AHEAD, Crew
from flowrl.nodes._backend.judge import Judging

if TYPE_CHECKING:
    import httpx

FAKE = "fake:"
FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0
"""Seconds before the first retry, and before any; each wait is twice as long as the one before."""
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""HTTP states that may be another by the next try."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


class ServerError(RuntimeError):
    """The server did not give a reply; the message holds what it gave."""


class Busy(ServerError):
    """It may give one at the next try, after `wait` seconds if it says so."""

    def __init__(self, problem: str, wait: float = 0.0) -> None:
        super().__init__(problem)
        self.wait = wait


class Judge(Judging):
    """Ask a language model behind an OpenAI-compatible server, many samples at a time, and read a score in its reply.

    A reply without a verdict, and a server that fails in spite of retries, leave the sample without a score.
    """

    url: str = Field(min_length=1, examples=["fake:Score: 7"])
    """The server, such as `http://127.0.0.1:8000/v1`. `fake:TEXT` asks none and always replies TEXT."""
    server_model: str = "default"
    """The model's name there."""
    api_key_env: str | None = Field(None, min_length=1)
    """Environment variable of the workers that holds the key."""
    concurrency: int = Field(16, ge=1)
    """Requests that run at once on a worker."""
    retries: int = Field(4, ge=0)
    """Further tries, after growing waits, where the server is busy, failing or away. All of them together have the
    node's `timeout` for a sample."""
    options: dict[str, Any] = Field({})
    """Further fields of a request, such as `{top_p: 0.9}`."""

    _timeout: float | None = PrivateAttr(None)
    _crew: Crew | None = PrivateAttr(None)
    _client: Any = PrivateAttr(None)

    class Out(NamedTuple):
        reward: Sample[float]
        reward_info: Sample[Json]

    @field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if url.startswith(FAKE):
            return url
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            is_address = False
        if not is_address or any(letter.isspace() for letter in url):
            raise ValueError(f"'{url}' is no address: write http://HOST:PORT/v1")
        return url

    def lacks(self) -> Mapping[str, str]:
        if self.api_key_env is None or self.url.startswith(FAKE) or os.environ.get(self.api_key_env):
            return {}
        return {"api_key_env": f"the environment variable '{self.api_key_env}' with the judge's key is not set"}

    def rows_per_call(self) -> int:
        return CALLS_AHEAD * self.concurrency

    def setup(self, context: Context) -> None:
        self._timeout, self._crew = context.timeout, Crew()
        if not self.url.startswith(FAKE):
            self._client = self._connected()

    def _connected(self) -> httpx.AsyncClient:
        import httpx

        headers = {}
        if self.api_key_env is not None:
            if lacking := self.lacks():
                raise RuntimeError(*lacking.values())
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        direct = {f"all://{host}": None for host in LOOPBACK}  # a proxy reaches another machine's
        limits = httpx.Limits(max_connections=self.concurrency)
        # The engine limits the time of a sample; only a server that is not there should be found out sooner.
        limit = httpx.Timeout(None, connect=10.0)
        return httpx.AsyncClient(headers=headers, mounts=direct, limits=limits, timeout=limit)

    def close(self) -> None:
        if self._crew is not None:
            if self._client is not None:
                self._crew.run(self._client.aclose())
            self._crew.close()

    def run(
        self, response: Sample[str], prompt: Prompt[Json] | None = None, answer: Prompt[Json] | None = None
    ) -> Iterator[Out]:
        assert self._crew is not None, "setup comes before run"
        questions = self.asked(response, prompt, answer)

        async def judge(row: int) -> tuple[float, Any]:
            reply = await self._reply(questions[row])
            return self.score(reply), {"reply": reply}

        for rows, found in self._crew.judged(response.rows, judge, self.concurrency, self._timeout):
            yield self.Out(Sample(rows, [found[0]]), Sample(rows, [found[1]]))

    async def _reply(self, question: str) -> str:
        """The judge's reply. Raises `ServerError` when the last try failed too."""
        if self.url.startswith(FAKE):
            return self.url.removeprefix(FAKE)
        problems: list[str] = []
        wait = 0.0

        def failed() -> str:
            times = f"{len(problems)} time{'s' * (len(problems) > 1)}"
            return f"the judge at {self.url} failed {times}, the last with {problems[-1]}"

        try:
            while len(problems) <= self.retries:
                await asyncio.sleep(wait)
                try:
                    return await self._tried(question)
                except Busy as busy:
                    problems.append(str(busy))
                    growing = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (len(problems) - 1)) * random.uniform(0.75, 1.25)
                    wait = busy.wait or growing
        except asyncio.CancelledError:  # the time of the sample is up; what failed until then says why
            raise asyncio.CancelledError(*[failed()] * bool(problems)) from None
        raise ServerError(failed())

    async def _tried(self, question: str) -> str:
        """The judge's reply. Raises `Busy` where another try may get one, `ServerError` where none will."""
        import httpx

        try:
            answer = await self._client.post(self._address(), json=self._body(question))
        except httpx.TransportError as error:
            raise Busy(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from error
        if answer.status_code in PASSING:
            raise Busy(f"HTTP {answer.status_code}: {answer.text[:200]}", _asked_to_wait(answer))
        return _content(answer)

    def _address(self) -> str:
        base = self.url.rstrip("/")
        return base if base.endswith("/chat/completions") else f"{base}/chat/completions"

    def _body(self, question: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": question.encode("utf-8", "replace").decode()}]
        own = {"model": self.server_model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return {**own, **self.options, "messages": messages}


def _content(answer: httpx.Response) -> str:
    """The text of a reply. Raises `ServerError` for anything else."""
    if answer.status_code != 200:
        raise ServerError(f"the judge's server refuses the request with HTTP {answer.status_code}: {answer.text[:200]}")
    try:
        content = answer.json()["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError):
        content = None
    if not isinstance(content, str):
        raise ServerError(f"the judge's server sent no reply: {answer.text[:200]}")
    return content


def _asked_to_wait(answer: httpx.Response) -> float:
    """Seconds that a server asks to be left alone; 0 where it does not say."""
    asked = answer.headers.get("retry-after", "")
    return min(LONGEST_WAIT, float(asked)) if asked.isdigit() else 0.0
