"""How far two policies differ at each token, for nodes that compute no gradient and need no torch.

The estimates are those of `losses.kl`, which has the gradients; a test keeps them equal.
"""

from __future__ import annotations

from typing import Literal, assert_never

import numpy as np

from flowrl.batch import Token
from flowrl.nodes._backend.terms import MAX_K3, MAX_LOG_RATIO
from flowrl.rows import Array

Estimator = Literal["k1", "k2", "k3", "abs"]


def log_ratio(mask: Array, **columns: Token[float]) -> Array:
    """The first of two columns of log-probabilities minus the second, float64 (T,); 0 outside of the mask (T,).

    Raises `ValueError` for a value within the mask that is not finite.
    """
    for name, column in columns.items():
        if len(broken := np.flatnonzero(mask & ~np.isfinite(column.values))):
            where = column.rows.names()[column.jagged.row[broken[0]]]
            raise ValueError(f"{name} of {where} has a value that is not finite")
    first, second = (column.values[mask].astype(np.float64) for column in columns.values())
    found = np.zeros(len(mask))
    found[mask] = first - second
    return found


def estimate(difference: Array, kind: Estimator) -> Array:
    """Of log-probabilities minus those of the reference, (T,): d, d²/2, min(exp(-d) + d - 1, 10) or |d|."""
    if kind == "k1":
        return difference
    if kind == "k2":
        return np.asarray(np.square(difference) / 2)
    if kind == "abs":
        return np.abs(difference)
    if kind == "k3":
        bounded = difference.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return np.asarray(np.minimum(np.expm1(-bounded) + bounded, MAX_K3))
    assert_never(kind)
