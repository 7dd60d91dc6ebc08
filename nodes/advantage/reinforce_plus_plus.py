"""REINFORCE++: discounted returns, whitened over the batch instead of compared with a group.

Source: Hu et al., "REINFORCE++", arXiv:2501.03262. The reward is earned at the last token that the model wrote:

    G[t] = reward[t] + gamma * G[t + 1],    A = (G - mean of G) / std of G    over all tokens of the loss mask

where t + 1 is the next token that the model wrote: what tools wrote in between is no step, and the return passes over
it as it is. Where `token_rewards` are written, as by `reward.kl_penalty`, they take the place of the reward, which then
says only what was scored. Each output of a session ends in the session's reward. We depart from the paper where a batch
tells nothing: equal returns give exactly 0; and unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from flowrl.batch import Sample, Token
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores, report_advantages
from flowrl.nodes._backend.returns import Steps, whitened


class ReinforcePlusPlus(Node):
    """Give each token its discounted return, whitened over the batch."""

    scope = "batch"

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token that the model wrote."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool], token_rewards: Token[float] | None = None) -> Out:
        scores = Scores.of(reward)
        mask = scores.loss_mask(response_mask)
        steps = Steps.of(mask)
        advantage = whitened(steps.discounted(steps.rewards(scores.per_row(scores.score), token_rewards), self.gamma))
        scores.report()
        report_advantages(advantage)
        return self.Out(steps.per_token(advantage), mask)
