"""Returns along trajectories whose tokens are partly a tool's, and whitening: the maths of token-level advantages.

Contract: an episode is the trainable tokens of a row, one after the other. An observation between two of them is part
of the state, no step: nothing is discounted over it, and what it earned belongs to the last trainable token before it
(to the first of its row, where it has none before). Float64, and no loop over rows: a recurrence of L steps takes
log2(L) passes over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowrl.batch import Token
from flowrl.rows import Array, offsets_of

MIN_VARIANCE = 1e-8
"""Added to the variance before its root."""


@dataclass(frozen=True)
class Steps:
    """The K trainable tokens of a batch of N rows with T tokens."""

    mask: Token[bool]
    """Which they are."""
    end: Array
    """How many there are up to the end of each row (N,)."""
    num: Array
    """How many each row has (N,)."""
    left: Array
    """How many of the same row follow each (K,)."""

    @classmethod
    def of(cls, mask: Token[bool]) -> Steps:
        """From the mask of what is trained."""
        so_far = offsets_of(mask.values)[mask.offsets]
        end, num = so_far[1:], np.diff(so_far)
        return cls(mask, end, num, np.repeat(end - 1, num) - np.arange(end[-1] if len(end) else 0))

    def rewards(self, of_rows: Array, token_rewards: Token[float] | None = None) -> Array:
        """What each trainable token earned (K,): the reward of its row (N,) if it is the last one, else 0.

        `token_rewards` take the place of these, where given; a row without a trainable token has nowhere to put any.
        """
        if token_rewards is None:
            found = np.zeros(len(self.left))
            found[self.end[self.num > 0] - 1] = of_rows[self.num > 0]
            return found
        lengths = self.mask.lengths
        place = np.maximum(np.cumsum(self.mask.values) - 1, np.repeat(self.end - self.num, lengths))
        kept = np.repeat(self.num > 0, lengths)
        return np.bincount(place[kept], token_rewards.values[kept], len(self.left))

    def discounted(self, values: Array, discount: float) -> Array:
        """y of y[t] = values[t] + discount * y[t + 1] along each row (K,).

        By doubling: after pass k each y holds the first 2^k terms of its sum.
        """
        total, reach = values.astype(np.float64), 1
        while reach <= self.left.max(initial=0):
            total[:-reach] += np.where(self.left[:-reach] >= reach, discount**reach * total[reach:], 0.0)
            reach *= 2
        return total

    def next(self, values: Array) -> Array:
        """The value of the next trainable token of the row (K,), 0 after the last."""
        return np.where(self.left > 0, np.append(values[1:], 0.0)[: len(values)], 0.0)

    def per_token(self, values: Array) -> Token[float]:
        """Values of trainable tokens (K,) in their places, 0 elsewhere."""
        spread = np.zeros(len(self.mask.values))
        spread[self.mask.values] = values
        return Token(self.mask.rows, spread, self.mask.offsets)


def whitened(values: Array, weights: Array | None = None) -> Array:
    """Values with mean 0 and sample variance 1; exactly 0 where all are the same, or there is one.

    `weights` are how many tokens have each value, 1 unless given; those of none do not count.
    """
    weights = np.ones(len(values)) if weights is None else weights
    counted = values[weights > 0]
    if counted.max(initial=-np.inf) <= counted.min(initial=np.inf):
        return np.zeros(len(values))
    num = weights.sum()
    centred: Array = values - weights @ values / num
    found: Array = centred / np.sqrt(weights @ np.square(centred) / (num - 1) + MIN_VARIANCE)
    return found
