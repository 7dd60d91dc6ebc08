"""ReMax: each reward less that of the likeliest response to the same prompt.

Source: Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language
Models", arXiv:2310.10505:

    A_i = r(x, y_i) - r(x, greedy response to x)

`baseline` is that reward, one value per prompt:

    greedy:        {use: rollout.greedy, model: policy, pool: generate, max_tokens: 8}
    greedy_reward: {use: reward.exact_match, reads: {response: greedy_response}, writes: {reward: greedy_reward}}
    baseline:      {use: reward.baseline, reads: {reward: greedy_reward}}

or any other expectation of the prompt's reward, such as a column of the data. A reward that equals the baseline gives
exactly 0, and nothing is divided by a deviation. Sessions that were not scored, or whose baseline was not, are left out
of statistics and loss. See docs/decisions/remax.md.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowrl.batch import Prompt, Sample, Token
from flowrl.metrics import metric
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, of_sessions


class Remax(Node):
    """Compare each session's reward with the baseline of its prompt."""

    scope = "group"

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], baseline: Prompt[float], response_mask: Token[bool]) -> Out:
        scores, baselines = Scores.all_of([reward, baseline.per_sample(reward)])
        known = baseline.values[np.isfinite(baseline.values)]
        metric("reward/baseline", known.sum(), len(known))
        return self.Out(*of_sessions(scores, scores.score - baselines.score, response_mask))
