"""Trajectories of one turn: n sampled responses to each prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from flowrl.batch import Json, Prompt, PromptToken, Sample, Step, Token
from flowrl.model import SettingError
from flowrl.nodes._backend.engine import Sampling
from flowrl.nodes._backend.generating import Generating
from flowrl.nodes._backend.rollouts import report
from flowrl.nodes._backend.vllm_options import VLLM_MAX_TEMPERATURE
from flowrl.rows import Rows


class Generate(Generating):
    """Sample a group of responses to each prompt; groups stream out as they finish."""

    temperature: float = Field(1.0, gt=0)
    """What logits are divided by, here and in every later log-probability."""

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
    def _the_engine_samples_at_this_temperature(self) -> Self:
        if self.engine == "vllm" and self.temperature > VLLM_MAX_TEMPERATURE:
            fact = f"vLLM samples at temperatures up to {VLLM_MAX_TEMPERATURE}, not at {self.temperature:g}"
            raise SettingError(("temperature", "engine"), fact, f"temperature: {VLLM_MAX_TEMPERATURE} or less")
        return self

    def run(self, prompt: Prompt[Json]) -> Iterator[Out]:
        for rows, prompts, done in self.sessions(prompt, Sampling(self.max_tokens, self.temperature, self.stop)):
            response_ids = Token[int].of(rows, [each.ids for each in done], "int")
            prompt_ids = PromptToken[int].of(rows, prompts)
            report(done, prompt_ids.lengths)
            yield self.Out(
                rows,
                prompt_ids,
                response_ids,
                Token(rows, np.ones(len(response_ids), dtype=np.bool_), response_ids.offsets),
                Token.of(rows, [each.log_probs for each in done], "float"),
                Token.of(rows, [each.versions for each in done], "int"),
                Sample(rows, [each.text for each in done]).cast("str"),
                Sample(rows, [each.finish_reason for each in done]).cast("str"),
                Sample(rows, np.ones(len(done), dtype=np.int64)),
                # Where a validation takes the likeliest token, that of the log-probabilities.
                Step(rows, self.temperature or 1.0),
                Step(rows, self.max_tokens),
            )
