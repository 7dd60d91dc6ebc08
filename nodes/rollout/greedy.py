"""The likeliest response to each prompt: what the sampled ones may be compared with, as `advantage.remax` does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flowrl.batch import Json, Prompt, PromptToken, Sample, Token
from flowrl.nodes._backend.engine import Sampling
from flowrl.nodes._backend.generating import Generating
from flowrl.nodes._backend.rollouts import report
from flowrl.rows import Rows


class Greedy(Generating):
    """Take the likeliest token each time: one response to each prompt, beside the group that is trained on.

    Its rows are sessions of their own, the first of each group: what is made of them becomes part of the others by way
    of a value per prompt, such as that of `reward.baseline`.
    """

    class Out(NamedTuple):
        rows: Rows
        greedy_prompt_ids: PromptToken[int]
        greedy_response_ids: Token[int]
        greedy_response_mask: Token[bool]
        greedy_response: Sample[str]
        greedy_finish_reason: Sample[str]

    def sessions_of(self, group: int) -> int:
        """One."""
        return 1

    def run(self, prompt: Prompt[Json]) -> Iterator[Out]:
        for rows, prompts, done in self.sessions(prompt, Sampling(self.max_tokens, 0.0, self.stop), most=1):
            response_ids = Token[int].of(rows, [each.ids for each in done], "int")
            prompt_ids = PromptToken[int].of(rows, prompts)
            report(done, prompt_ids.lengths, "greedy")
            yield self.Out(
                rows,
                prompt_ids,
                response_ids,
                Token(rows, np.ones(len(response_ids), dtype=np.bool_), response_ids.offsets),
                Sample(rows, [each.text for each in done]).cast("str"),
                Sample(rows, [each.finish_reason for each in done]).cast("str"),
            )
