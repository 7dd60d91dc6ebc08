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
from flowrl.rows import Array

MIN_VARIANCE = 1e-8
"""Added to the variance before its root."""


@dataclass(frozen=True)
class Steps:
    """The K trainable tokens of a batch."""

    mask: Array
    """Which of the T tokens they are (T,)."""
    row: Array
    """The row of each token (T,)."""
    left: Array
    """Trainable tokens of the same row that follow each (K,)."""

    @classmethod
    def of(cls, mask: Token[bool]) -> Steps:
        """From the mask of what is trained."""
        trainable, row = mask.values.astype(np.bool_), mask.jagged.row
        ends = np.cumsum(np.bincount(row[trainable], minlength=len(mask.rows)))
        return cls(trainable, row, ends[row[trainable]] - 1 - np.arange(trainable.sum()))

    def rewards(self, of_rows: Array, token_rewards: Token[float] | None = None) -> Array:
        """What each trainable token earned (K,): the reward of its row (N,) if it is the last one, else 0.

        `token_rewards` take the place of these, where given.
        """
        if token_rewards is not None:
            return self._moved(token_rewards.values)
        return np.where(self.left == 0, of_rows[self.row[self.mask]], 0.0)

    def _moved(self, values: Array) -> Array:
        """Values of tokens (T,) at trainable ones (K,); a row that has none has nowhere to put its own."""
        per_row = np.bincount(self.row, self.mask)
        ends = np.cumsum(per_row)
        place = np.cumsum(self.mask) - 1
        place = np.maximum(place, (ends - per_row)[self.row]).astype(np.int64)
        kept = per_row[self.row] > 0
        return np.bincount(place[kept], values[kept], len(self.left))

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

    def per_token(self, values: Array, like: Token[bool]) -> Token[float]:
        """Values of trainable tokens (K,) in their places, 0 elsewhere."""
        spread = np.zeros(len(self.mask))
        spread[self.mask] = values
        return Token(like.rows, spread, like.offsets)


def whitened(values: Array) -> Array:
    """Values with mean 0 and sample variance 1; exactly 0 where all are the same, or there is one."""
    if values.max(initial=-np.inf) <= values.min(initial=np.inf):
        return np.zeros(len(values))
    centred: Array = values - values.mean()
    whitened: Array = centred / np.sqrt(np.square(centred).sum() / (len(values) - 1) + MIN_VARIANCE)
    return whitened
