"""A judge that is a model of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from flowrl.batch import Json, Prompt, Sample
from flowrl.model import SettingError
from flowrl.node import Context
from flowrl.nodes._backend.answers import scored
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Engine, Request, Sampling, seed_of
from flowrl.nodes._backend.engines import close_engines, engine_for
from flowrl.nodes._backend.judge import Judging
from flowrl.nodes._backend.rollouts import encoded
from flowrl.nodes._backend.script import Script, refuse_unread
from flowrl.nodes._backend.vllm_options import refuse_unknown

SMALLEST_TEMPERATURE = 1e-3
"""Where an engine divides by it, 0 is so much: the likeliest token all but always."""


class JudgeModel(Judging):
    """Ask a frozen model of the pipeline, on a pool of its own, and read a score in its reply.

    A reply without a verdict leaves the sample without a score.
    """

    weights = "reads"
    device = "accelerator"

    engine: Literal["transformers", "vllm", "fake"] = Field(examples=["fake"])
    """What generates: a model in the worker, vLLM in processes of its own, or a script."""
    max_sequences: int | None = Field(None, ge=1)
    """Replies generated at a time; null is 512, or what vLLM chooses."""
    template_options: dict[str, Any] = Field({})
    """Further variables of the judge's chat template, such as `enable_thinking: false`."""
    engine_options: dict[str, Any] = Field({})
    """vLLM: any argument of its engine, by its name there."""
    script: Script = Script(texts=["Score: 7"])
    """What the fake engine answers."""

    _context: Context = PrivateAttr()
    _engine: Engine | None = PrivateAttr(None)

    class Out(NamedTuple):
        reward: Sample[float]
        reward_info: Sample[Json]

    @model_validator(mode="after")
    def _options_are_of_the_engine(self) -> Self:
        refuse_unread(self, self.engine)
        if self.engine == "vllm":
            refuse_unknown(self.engine_options)
        elif self.engine_options:
            raise SettingError(("engine_options", "engine"), f"engine '{self.engine}' has none", "engine: vllm")
        return self

    def setup(self, context: Context) -> None:
        self._context = context
        if context.model_spec.trainable and self.engine != "fake":
            raise ValueError(
                f"model '{context.model}' is trained, and the judge would stay as it was: use a frozen one"
            )
        chat = ChatFormat(options=self.template_options)
        self._engine = engine_for(
            context, "judge", self.engine, chat, self.script, self.max_sequences, self.engine_options
        )

    def close(self) -> None:
        if self._engine is not None:
            close_engines(self._context)

    def run(self, response: Sample[str], prompt: Prompt[Json] | None = None, answer: Prompt[Json] | None = None) -> Out:
        assert self._engine is not None, "setup comes before run"
        questions = self.asked(response, prompt, answer)
        own = np.arange(self._context.rank, len(response), self._context.num_ranks)
        rows = response.rows.take(own)
        replies = self._replies(self._engine, rows.names(), [questions[row] for row in own])
        found = scored(rows, lambda row: self._judged(replies[row]))
        scores, more = zip(*(one or (np.nan, None) for one in found), strict=True) if found else ((), ())
        return self.Out(Sample(rows, scores), Sample(rows, more))

    def _replies(self, engine: Engine, names: Sequence[str], questions: Sequence[str]) -> list[str | Exception]:
        """The reply to each question, or why there is none; each has a seed of its own, by the name of its row."""
        replies: list[str | Exception] = []
        requests: dict[int, Request] = {}
        for row, ids in enumerate(encoded(engine, questions)):
            replies.append(ids if isinstance(ids, Exception) else RuntimeError("the engine has sent no reply"))
            if not isinstance(ids, Exception):
                requests[row] = Request(ids, [seed_of(self._context.seed, names[row], 0)])
        least = SMALLEST_TEMPERATURE if self.engine == "transformers" else 0.0
        sampling, asked = Sampling(self.max_tokens, max(self.temperature, least)), list(requests)
        for finished in engine.generate(list(requests.values()), sampling):
            for each in finished:
                (reply,) = each.sessions
                replies[asked[each.request]] = reply if isinstance(reply, Exception) else reply.text
        return replies

    def _judged(self, reply: str | Exception) -> tuple[float, Any]:
        if isinstance(reply, Exception):
            raise reply
        return self.score(reply), {"reply": reply}
