"""Estimates of a divergence per token, for nodes that compute no gradient and need no torch.

The same as `losses.kl`, which has the gradients; a test keeps them equal.
"""

from __future__ import annotations

from typing import Literal, assert_never

import numpy as np

from flowrl.rows import Array

Estimator = Literal["k1", "k2", "k3", "abs"]
MAX_LOG_RATIO, MAX_K3 = 20.0, 10.0
"""As in `losses`."""


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
