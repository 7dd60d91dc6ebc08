"""What every rollout of one turn is: the engine that it asks, and the sessions that come back for its prompts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from flowrl.batch import Json, Prompt
from flowrl.metrics import failure
from flowrl.model import ModelSpec, SettingError
from flowrl.node import Context, Node
from flowrl.nodes._backend.chat import ChatFormat, encode_prompts
from flowrl.nodes._backend.engine import Aborted, Completion, Engine, Finished, Request, Sampling, seed_of
from flowrl.nodes._backend.engines import close_engines, engine_for
from flowrl.nodes._backend.fake import FakeEngine
from flowrl.nodes._backend.rollouts import encoded
from flowrl.nodes._backend.script import Script, refuse_unread
from flowrl.nodes._backend.vllm_options import refuse_unknown
from flowrl.rows import Array, Rows


class Sessions(NamedTuple):
    """Sessions that have finished together: of whole groups."""

    rows: Rows
    """One for each that came to an end."""
    prompts: Sequence[Sequence[int]]
    """Token ids of the prompt of each group."""
    done: Sequence[Completion]
    """What each row consists of."""


class Generating(Node):
    """Base of rollouts of one turn. Those of one model that ask for the same engine share it."""

    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    engine: Literal["transformers", "vllm", "fake"] = "transformers"
    """What generates: a model in the worker, vLLM in processes of its own, or a script, which stands in for either and
    takes no notice of `stop`, chat template, temperature and `max_sequences`."""
    max_tokens: int = Field(ge=1)
    """Longest response, in tokens; shorter where the model's position limit leaves less room."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), strict=False)
    """Texts that end a response, beside the model's end tokens; the response holds them."""
    chat_template: bool = True
    """Present a prompt that is text as a user's turn where the tokenizer has a chat template; messages always are."""
    template_options: dict[str, Any] = Field({})
    """Further variables of the chat template, such as `enable_thinking: false`."""
    max_sequences: int | None = Field(None, ge=1)
    """Sessions generated at a time; null is 512, as far as whole groups allow, or what vLLM chooses."""
    tensor_parallel: int = Field(1, ge=1)
    """vLLM: workers of the pool that one copy of the model is split over; the pool then holds workers / this copies."""
    engine_options: dict[str, Any] = Field({})
    """vLLM: any argument of its engine, such as `max_model_len` or `gpu_memory_utilization`, by its name there."""
    script: Script = Script()
    """What the fake engine answers."""

    _engine: Engine | None = PrivateAttr(None)
    _context: Context = PrivateAttr()

    @model_validator(mode="after")
    def _options_are_of_the_engine(self) -> Self:
        refuse_unread(self, self.engine)
        if self.engine == "vllm":
            refuse_unknown(self.engine_options)
            return self
        for key in ("engine_options", "tensor_parallel"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise SettingError((key, "engine"), f"engine '{self.engine}' has no {key}", "engine: vllm")
        return self

    def workers_per_copy(self) -> int:
        """As many as its tensors are split over."""
        return self.tensor_parallel

    def prompt_lengths(self, model: ModelSpec, prompts: Sequence[Any]) -> Sequence[int]:
        """Tokens of each prompt after the chat template."""
        if self.engine == "fake":
            return [len(ids) for ids in FakeEngine(self.script).encode(prompts)]
        from flowrl.nodes._backend.models import load_tokenizer, require_causal

        require_causal(model)
        return [len(ids) for ids in encode_prompts(load_tokenizer(model), prompts, self._chat())]

    def setup(self, context: Context) -> None:
        self._context = context
        if context.rank % self.tensor_parallel:
            return  # its device is lent to the first worker of the copy
        # Rollouts of one model share an engine unless they want it made in another way.
        self._engine = engine_for(
            context, "rollout", self.engine, self._chat(), self.script, self.max_sequences, self.engine_options,
            self.tensor_parallel,
        )  # fmt: skip

    def _chat(self) -> ChatFormat:
        return ChatFormat(self.chat_template, self.template_options)

    def close(self) -> None:
        """End the engine's processes."""
        if self._engine is not None:
            close_engines(self._context)

    def sleep(self) -> None:
        """Let the engine leave the device's memory to training."""
        if self._engine is not None:
            self._engine.sleep()

    def wake(self) -> None:
        """Let the engine take its memory again."""
        if self._engine is not None:
            self._engine.wake()

    def abort(self, uids: Collection[str]) -> None:
        """Let the engine end these groups."""
        if self._engine is not None:
            self._engine.abort(uids)

    def sessions(self, prompt: Prompt[Json], sampling: Sampling, most: int | None = None) -> Iterator[Sessions]:
        """Sessions of each prompt, as many as are planned but no more than `most`, as whole groups finish."""
        assert self._engine is not None, "setup comes before run, and only the first worker of a copy runs"
        planned = prompt.rows.planned if most is None else np.minimum(prompt.rows.planned, most)
        rows, requests = self._requests(self._engine, prompt, planned)
        for finished in self._engine.generate(requests, sampling):
            if finished:
                yield _finished(rows, requests, finished)

    def _requests(self, engine: Engine, prompt: Prompt[Json], planned: Array) -> tuple[Rows, list[Request]]:
        """A request for each prompt that has tokens, and their rows."""
        kept: list[int] = []
        requests: list[Request] = []
        for index, ids in enumerate(encoded(engine, list(prompt))):
            uid, sessions = prompt.rows.uids[index], range(int(planned[index]))
            if isinstance(ids, Exception):
                failure([f"{uid}_{session}_0" for session in sessions], ids)
            else:
                kept.append(index)
                requests.append(Request(ids, [seed_of(self._context.seed, uid, session) for session in sessions], uid))
        sizes = planned[np.array(kept, dtype=np.int64)]
        return Rows([prompt.rows.uids[group] for group in kept], planned=sizes, settled=sizes), requests


def _finished(prompts: Rows, requests: Sequence[Request], finished: Sequence[Finished]) -> Sessions:
    groups: list[int] = []
    sessions: list[int] = []
    done: list[Completion] = []
    for group, each in enumerate(finished):
        for session, result in enumerate(each.sessions):
            if isinstance(result, Aborted):
                continue  # whoever asked for it knows
            if isinstance(result, Exception):
                failure([f"{prompts.uids[each.request]}_{session}_0"], result)
            else:
                groups.append(group)
                sessions.append(session)
                done.append(result)
    planned = prompts.planned[[each.request for each in finished]]
    # A failed or aborted session has settled too: nobody waits for it.
    rows = Rows([prompts.uids[e.request] for e in finished], groups, sessions, planned=planned, settled=planned)
    return Sessions(rows, [requests[each.request].prompt for each in finished], done)
