"""Trajectories of one turn: n sampled responses to each prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, PrivateAttr

from flowrl.batch import Prompt, PromptToken, Sample, Step, Token
from flowrl.metrics import failure, metric
from flowrl.node import Context, Node
from flowrl.nodes._backend.engine import Completion, Engine, Finished, Request, Sampling, engines_of, seed_of
from flowrl.nodes._backend.fake import FakeEngine, Script
from flowrl.rows import Rows


class Generate(Node):
    """Sample a group of responses to each prompt; groups stream out as they finish."""

    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    engine: Literal["transformers", "fake"] = "transformers"
    """What generates: a model in the worker, or a script."""
    max_tokens: int = Field(ge=1)
    """Longest response, in tokens; shorter where the model's position limit leaves less room."""
    temperature: float = Field(1.0, gt=0)
    """What logits are divided by, here and in every later log-probability."""
    chat_template: bool = True
    """Present the prompt as a user's turn where the tokenizer has a chat template."""
    max_sequences: int = Field(512, ge=1)
    """Sessions generated at a time, as far as whole groups allow."""
    script: Script = Script()
    """What the fake engine answers."""

    _engine: Engine | None = PrivateAttr(None)
    _seed: int = PrivateAttr(0)

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

    def setup(self, context: Context) -> None:
        engines = engines_of(context)
        # Rollouts of one model share an engine unless they want it made in another way.
        key = f"{self.engine}/{self.chat_template}/{self.max_sequences}/{self.script.model_dump_json()}"
        if key not in engines:
            engines[key] = self._make_engine(context)
        self._engine, self._seed = engines[key], context.seed

    def _make_engine(self, context: Context) -> Engine:
        if self.engine == "fake":
            return FakeEngine(self.script)
        from flowrl.nodes._backend.generation import TransformersEngine
        from flowrl.nodes._backend.models import use_threads

        use_threads(context)
        return TransformersEngine(context.model_spec, context.device, self.chat_template, self.max_sequences)

    def run(self, prompt: Prompt[str]) -> Iterator[Out]:
        assert self._engine is not None, "setup comes before run"
        rows, requests = self._requests(self._engine, prompt)
        for finished in self._engine.generate(requests, Sampling(self.max_tokens, self.temperature)):
            if finished:
                yield self._block(rows, requests, finished)

    def _requests(self, engine: Engine, prompt: Prompt[str]) -> tuple[Rows, list[Request]]:
        """A request for each prompt that has tokens, and their rows."""
        kept: list[int] = []
        requests: list[Request] = []
        for index, ids in enumerate(_encoded(engine, list(prompt))):
            uid, sessions = prompt.rows.uids[index], range(int(prompt.rows.planned[index]))
            if isinstance(ids, Exception):
                failure([f"{uid}_{session}_0" for session in sessions], ids)
            else:
                kept.append(index)
                requests.append(Request(ids, [seed_of(self._seed, uid, session) for session in sessions]))
        return prompt.rows.take_groups(np.array(kept, dtype=np.int64))[0], requests

    def _block(self, prompts: Rows, requests: Sequence[Request], finished: Sequence[Finished]) -> Out:
        groups: list[int] = []
        sessions: list[int] = []
        done: list[Completion] = []
        for group, each in enumerate(finished):
            for session, result in enumerate(each.sessions):
                if isinstance(result, Exception):
                    failure([f"{prompts.uids[each.request]}_{session}_0"], result)
                else:
                    groups.append(group)
                    sessions.append(session)
                    done.append(result)
        planned = prompts.planned[[each.request for each in finished]]
        # A failed session has settled too: nobody waits for it.
        rows = Rows([prompts.uids[e.request] for e in finished], groups, sessions, planned=planned, settled=planned)
        response_ids = Token[int].of(rows, [each.ids for each in done], "int")
        _report(done)
        return self.Out(
            rows,
            PromptToken.of(rows, [requests[each.request].prompt for each in finished]),
            response_ids,
            Token(rows, np.ones(len(response_ids), dtype=np.bool_), response_ids.offsets),
            Token.of(rows, [each.log_probs for each in done], "float"),
            Token.of(rows, [each.versions for each in done], "int"),
            Sample(rows, [each.text for each in done]).cast("str"),
            Sample(rows, [each.finish_reason for each in done]).cast("str"),
            Sample(rows, np.ones(len(done), dtype=np.int64)),
            Step(rows, self.temperature),
            Step(rows, self.max_tokens),
        )


def _encoded(engine: Engine, prompts: Sequence[str]) -> list[list[int] | Exception]:
    """Token ids, or why a prompt has none: all at once, which is fast, and one by one where one of them fails."""
    try:
        return [*engine.encode(prompts)]
    except Exception as error:
        return [error] if len(prompts) == 1 else [ids for prompt in prompts for ids in _encoded(engine, [prompt])]


def _report(done: Sequence[Completion]) -> None:
    lengths = [len(each.ids) for each in done]
    metric("rollout/tokens", sum(lengths), reduce="sum")
    metric("rollout/response_length/mean", sum(lengths), len(lengths))
    metric("rollout/response_length/max", max(lengths, default=0), reduce="max")
    for reason in ("stop", "length", "abort"):
        metric(f"rollout/finish/{reason}", sum(each.finish_reason == reason for each in done), len(done))
