"""Generalized advantage estimates with a critic, for PPO.

Source: Schulman et al., arXiv:1506.02438, equation 16, with the reward at the last token that the model wrote:

    delta[t] = reward[t] + gamma * V[t + 1] - V[t]
    A[t] = delta[t] + gamma * lam * A[t + 1],    return[t] = A[t] + V[t]

where t + 1 is the next token that the model wrote: what tools wrote in between is no step, and its values are not read.
Where `token_rewards` are written, as by `reward.kl_penalty`, they take the place of the reward, which then says only
what was scored. Each output of a session ends in the session's reward. `returns`, which the critic learns, are from
before the whitening. We depart from it where a batch tells nothing: equal advantages are whitened to exactly 0; and
unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Sample, Token
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, report_advantages
from flowrl.nodes._backend.returns import Steps, whitened


class Gae(Node):
    """Weigh, for each token, what followed against what the critic expected."""

    scope = "batch"

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token that the model wrote."""
    lam: float = Field(0.95, ge=0, le=1)
    """How far the advantage looks beyond the next value: 0 trusts the critic, 1 the reward."""
    whiten: bool = True
    """Give the advantages mean 0 and variance 1 over the tokens of the loss mask."""

    class Out(NamedTuple):
        advantages: Token[float]
        returns: Token[float]
        loss_mask: Token[bool]

    def run(
        self,
        reward: Sample[float],
        values: Token[float],
        response_mask: Token[bool],
        token_rewards: Token[float] | None = None,
    ) -> Out:
        scores = Scores.of(reward)
        mask = scores.loss_mask(response_mask)
        steps = Steps.of(mask)
        value = values.values[mask.values].astype(np.float64)
        delta = steps.rewards(scores.per_row(scores.score), token_rewards) + self.gamma * steps.next(value) - value
        advantage = steps.discounted(delta, self.gamma * self.lam)
        returns = steps.per_token(advantage + value)
        if self.whiten:
            advantage = whitened(advantage)
        scores.report()
        report_advantages(advantage)
        return self.Out(steps.per_token(advantage), returns, mask)
