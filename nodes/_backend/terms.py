"""The terms of a policy's loss by name, and their limits: what settings and losses share, without torch."""

from __future__ import annotations

from typing import Literal

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KlKind = Literal["k1", "k2", "k3", "abs", "k1+", "k3+"]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to plus and minus this before any exponential: exp(20) and its gradient are finite."""
MAX_K3 = 10.0
"""Largest value of the k3 estimate of one token."""
