"""What sessions were rewarded with, compared within their groups: what all nodes of `advantage.*` share.

Contract: a session counts once, by the reward of its last output, however many outputs it has. One without a reward is
in no statistic, has advantage 0 and no token in the loss mask. A group of one, or of equal rewards, tells nothing:
there the distance from the mean is exactly 0. Statistics are in float64 and never loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flowrl.batch import Sample, Token
from flowrl.metrics import metric
from flowrl.nodes._backend.sessions import extremes, sessions
from flowrl.rows import Array, Rows, offsets_of


@dataclass(frozen=True)
class Groups:
    """Of the G groups, over their scored sessions; float64."""

    num_scored: Array
    """Scored sessions (G,)."""
    mean: Array
    """Mean reward (G,); 0 where nothing was scored."""
    std: Array
    """Sample standard deviation (G,), ddof 1; 0 where `signal` is False."""
    signal: Array
    """Whether the group has two different rewards (G,), by comparison and not by a rounded deviation."""


@dataclass(frozen=True)
class Scores:
    """The S sessions of a batch that were scored."""

    rows: Rows
    session: Array
    """Position among them (N,) of each trajectory's session; -1 where it was not scored."""
    group: Array
    """The group (S,) of each."""
    score: Array
    """What each was rewarded with (S,); float64."""
    num_unscored: int
    """Sessions that were not scored."""

    @classmethod
    def of(cls, reward: Sample[float]) -> Scores:
        """From a reward of each trajectory, NaN where there is none."""
        (scores,) = cls.all_of([reward])
        return scores

    @classmethod
    def all_of(cls, rewards: Sequence[Sample[float]]) -> list[Scores]:
        """The same sessions under several rewards of the same rows: those that have every one of them."""
        rows = rewards[0].rows
        session_of, last = sessions(rows)
        table = np.stack([reward.values[last].astype(np.float64) for reward in rewards])
        scored = np.isfinite(table).all(axis=0)
        position = np.where(scored, np.cumsum(scored) - 1, -1)[session_of]
        group, num_unscored = rows.group[last][scored], int((~scored).sum())
        return [cls(rows, position, group, score, num_unscored) for score in table[:, scored]]

    @cached_property
    def groups(self) -> Groups:
        """Statistics of the groups."""
        group, num_groups = self.group, self.rows.num_groups
        count = np.bincount(group, minlength=num_groups)
        mean = np.bincount(group, self.score, num_groups) / np.maximum(count, 1)
        lowest, highest = extremes(self.score, group, num_groups)
        signal = highest > lowest
        squares = np.bincount(group, (self.score - mean[group]) ** 2, num_groups)
        return Groups(count, mean, np.where(signal, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0), signal)

    @property
    def signal(self) -> Array:
        """Whether the session's group tells anything (S,)."""
        found: Array = self.groups.signal[self.group]
        return found

    @property
    def above_mean(self) -> Array:
        """How far each reward lies above the mean of its group (S,); exactly 0 where the group tells nothing."""
        return np.where(self.signal, self.score - self.groups.mean[self.group], 0.0)

    @property
    def above_others(self) -> Array:
        """How far each reward lies above the mean of the others of its group (S,): s - (sum - s) / (n - 1)."""
        size = self.groups.num_scored[self.group]
        found: Array = self.above_mean * size / np.maximum(size - 1, 1)
        return found

    def divided_by_std(self, values: Array, epsilon: float) -> Array:
        """Values of sessions (S,) over the standard deviation of their group; what is 0 stays so."""
        return np.divide(values, self.groups.std[self.group] + epsilon, out=np.zeros_like(values), where=self.signal)

    def num_tokens(self, mask: Token[bool]) -> Array:
        """Tokens of the mask that each session has in all its trajectories (S,)."""
        so_far, scored = offsets_of(mask.values)[mask.offsets], self.session >= 0
        return np.bincount(self.session[scored], np.diff(so_far)[scored], len(self.score))

    def per_row(self, values: Array) -> Array:
        """Values of sessions (S,) for their trajectories (N,); 0 where a session was not scored."""
        found: Array = np.append(values, np.zeros(1, values.dtype))[self.session]
        return found

    def loss_mask(self, response_mask: Token[bool]) -> Token[bool]:
        """The tokens that the model wrote in sessions that were scored."""
        return response_mask & Sample(self.rows, self.session >= 0).per_token(response_mask)

    def per_token(self, values: Array, mask: Token[bool]) -> Token[float]:
        """Values of sessions (S,) for each of their tokens, 0 outside the mask."""
        spread: Token[Any] = Sample(self.rows, self.per_row(values)).per_token(mask)
        return Token(self.rows, np.where(mask.values, spread.values, 0.0), mask.offsets)

    def report(self) -> None:
        """`reward/*` and `groups/*`."""
        groups = self.groups
        compared = groups.num_scored > 1
        metric("reward/mean", self.score.sum(), len(self.score))
        metric("reward/std", groups.std[compared].sum(), compared.sum())
        metric("reward/unscored", self.num_unscored, reduce="sum")
        metric("groups/size", groups.num_scored.sum(), len(compared))
        metric("groups/single", (groups.num_scored == 1).sum(), reduce="sum")


def report_advantages(advantages: Array) -> None:
    """`advantage/*`, of scored sessions where all tokens of one have the same, else of the tokens of the loss mask."""
    metric("advantage/abs", np.abs(advantages).sum(), len(advantages))
    metric("advantage/min", advantages.min(initial=0.0), reduce="min")
    metric("advantage/max", advantages.max(initial=0.0), reduce="max")


def of_sessions(scores: Scores, advantages: Array, response_mask: Token[bool]) -> tuple[Token[float], Token[bool]]:
    """Advantages and loss mask, where every token of a session has its advantage (S,); reports both.

    A group has no signal if all its advantages are 0, be it that its rewards are equal or that they are what was
    expected.
    """
    scores.report()
    report_advantages(advantages)
    signals = np.bincount(scores.group, advantages != 0, scores.rows.num_groups)
    metric("groups/no_signal", (signals == 0).sum(), reduce="sum")
    mask = scores.loss_mask(response_mask)
    return scores.per_token(advantages, mask), mask
