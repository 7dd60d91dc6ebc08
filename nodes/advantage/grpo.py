"""Group-relative advantages.

Source: Shao et al., "DeepSeekMath", arXiv:2402.03300, equation 3 with outcome supervision; without the division by the
standard deviation it is Dr. GRPO, Liu et al., arXiv:2503.20783. We depart from both where a group tells nothing: equal
rewards, or a single scored session, give exactly 0; and unscored sessions are left out of statistics and loss.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Sample, Token
from flowrl.metrics import metric
from flowrl.node import Node
from flowrl.nodes._backend.sessions import extremes, sessions
from flowrl.rows import Array


class Statistics(NamedTuple):
    """Of the G groups, over their scored sessions; float64."""

    num_scored: Array
    """Scored sessions (G,)."""
    mean: Array
    """Mean reward (G,); 0 where nothing was scored."""
    std: Array
    """Sample standard deviation (G,), ddof 1; 0 where `signal` is False."""
    signal: Array
    """Whether the group has two different rewards (G,), by comparison and not by a rounded deviation."""


class Grpo(Node):
    """Compare each session's reward with those of its group, and give every token of the session the result."""

    scope = "group"
    compares_samples = True

    normalize: Literal["std", "none"] = "std"
    """Divide by the group's standard deviation, or do not (Dr. GRPO)."""
    epsilon: float = Field(1.0e-6, ge=0)
    """Added to the standard deviation."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        rows = reward.rows
        session_of, last = sessions(rows)
        score = reward.values[last].astype(np.float64)
        group = rows.group[last]
        scored = np.isfinite(score)
        statistics = self._statistics(score[scored], group[scored], rows.num_groups)
        advantage = np.zeros(len(score))
        kept = scored & statistics.signal[group]
        advantage[kept] = score[kept] - statistics.mean[group[kept]]
        if self.normalize == "std":
            advantage[kept] /= statistics.std[group[kept]] + self.epsilon
        self._report(statistics, score[scored], advantage[scored], int((~scored).sum()))
        loss_mask = response_mask & Sample(rows, scored[session_of]).per_token(response_mask)
        advantages = Sample(rows, advantage[session_of]).per_token(response_mask).values * loss_mask.values
        return self.Out(Token(rows, advantages, response_mask.offsets), loss_mask)

    @staticmethod
    def _statistics(score: Array, group: Array, num_groups: int) -> Statistics:
        count = np.bincount(group, minlength=num_groups)
        mean = np.bincount(group, score, num_groups) / np.maximum(count, 1)
        lowest, highest = extremes(score, group, num_groups)
        signal = highest > lowest
        squares = np.bincount(group, (score - mean[group]) ** 2, num_groups)
        std = np.where(signal, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)
        return Statistics(count, mean, std, signal)

    @staticmethod
    def _report(statistics: Statistics, score: Array, advantage: Array, num_unscored: int) -> None:
        compared = statistics.num_scored > 1
        metric("reward/mean", score.sum(), len(score))
        metric("reward/std", statistics.std[compared].sum(), compared.sum())
        metric("reward/unscored", num_unscored, reduce="sum")
        metric("groups/size", statistics.num_scored.sum(), len(compared))
        metric("groups/no_signal", (~statistics.signal).sum(), reduce="sum")
        metric("groups/single", (statistics.num_scored == 1).sum(), reduce="sum")
        metric("advantage/abs", np.abs(advantage).sum(), len(advantage))
        metric("advantage/min", advantage.min(initial=0.0), reduce="min")
        metric("advantage/max", advantage.max(initial=0.0), reduce="max")
