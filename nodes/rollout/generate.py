"""Trajectories of one turn: n sampled responses to each prompt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from flowrl.batch import Json, Prompt, PromptToken, Sample, Step, Token
from flowrl.metrics import failure
from flowrl.model import ModelSpec, SettingError
from flowrl.node import Context, Node
from flowrl.nodes._backend.chat import ChatFormat, encode_prompts
from flowrl.nodes._backend.engine import Aborted, Completion, Engine, Finished, Request, Sampling, seed_of
from flowrl.nodes._backend.engines import close_engines, engine_for
from flowrl.nodes._backend.fake import FakeEngine
from flowrl.nodes._backend.rollouts import encoded, report
from flowrl.nodes._backend.script import Script
from flowrl.nodes._backend.vllm_options import VLLM_MAX_TEMPERATURE, refuse_unknown
from flowrl.rows import Rows


class Generate(Node):
    """Sample a group of responses to each prompt; groups stream out as they finish."""

    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    engine: Literal["transformers", "vllm", "fake"] = "transformers"
    """What generates: a model in the worker, vLLM in processes of its own, or a script."""
    max_tokens: int = Field(ge=1)
    """Longest response, in tokens; shorter where the model's position limit leaves less room."""
    temperature: float = Field(1.0, gt=0)
    """What logits are divided by, here and in every later log-probability."""
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

    class Out(NamedTuple):
        rows: Rows
        prompt_ids: PromptToken[int]
        response_ids: Token[int]
        response_mask: Token[bool]
        rollout_log_probs: Token[float]
        policy_version: Token[int]
        response: Sample[str]
        finish_reason: Sample[str]
        num_turns: Sample[int]
        temperature: Step[float]
        max_tokens: Step[int]

    @model_validator(mode="after")
    def _options_are_of_the_engine(self) -> Self:
        if self.engine == "vllm":
            refuse_unknown(self.engine_options)
            if self.temperature > VLLM_MAX_TEMPERATURE:
                fact = f"vLLM samples at temperatures up to {VLLM_MAX_TEMPERATURE}, not at {self.temperature:g}"
                raise SettingError(("temperature", "engine"), fact, f"temperature: {VLLM_MAX_TEMPERATURE} or less")
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

    def run(self, prompt: Prompt[Json]) -> Iterator[Out]:
        assert self._engine is not None, "setup comes before run, and only the first worker of a copy runs"
        rows, requests = self._requests(self._engine, prompt)
        for finished in self._engine.generate(requests, Sampling(self.max_tokens, self.temperature, self.stop)):
            if finished:
                yield self._block(rows, requests, finished)

    def _requests(self, engine: Engine, prompt: Prompt[Json]) -> tuple[Rows, list[Request]]:
        """A request for each prompt that has tokens, and their rows."""
        kept: list[int] = []
        requests: list[Request] = []
        for index, ids in enumerate(encoded(engine, list(prompt))):
            uid, sessions = prompt.rows.uids[index], range(int(prompt.rows.planned[index]))
            if isinstance(ids, Exception):
                failure([f"{uid}_{session}_0" for session in sessions], ids)
            else:
                kept.append(index)
                requests.append(Request(ids, [seed_of(self._context.seed, uid, session) for session in sessions], uid))
        return prompt.rows.take_groups(np.array(kept, dtype=np.int64))[0], requests

    def _block(self, prompts: Rows, requests: Sequence[Request], finished: Sequence[Finished]) -> Out:
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
        response_ids = Token[int].of(rows, [each.ids for each in done], "int")
        prompt_ids = PromptToken[int].of(rows, [requests[each.request].prompt for each in finished])
        report(done, prompt_ids.lengths)
        return self.Out(
            rows,
            prompt_ids,
            response_ids,
            Token(rows, np.ones(len(response_ids), dtype=np.bool_), response_ids.offsets),
            Token.of(rows, [each.log_probs for each in done], "float"),
            Token.of(rows, [each.versions for each in done], "int"),
            Sample(rows, [each.text for each in done]).cast("str"),
            Sample(rows, [each.finish_reason for each in done]).cast("str"),
            Sample(rows, np.ones(len(done), dtype=np.int64)),
            Step(rows, self.temperature or 1.0),  # that of the log-probabilities, where the likeliest token is taken
            Step(rows, self.max_tokens),
        )
