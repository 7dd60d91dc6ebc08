"""How far the rollout engine and the trainer are apart, in what they compute and in age."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from flowrl.metrics import metric
from flowrl.nodes._backend.terms import MAX_LOG_RATIO
from flowrl.rows import Array, Jagged


def report_mismatch(difference: Tensor, num_tokens: float) -> None:
    """Metrics of the (T,) log ratios of trainer to engine, which are 0 outside the mask."""
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metric("mismatch/log_ratio", difference.abs().sum().item(), num_tokens)
    metric("mismatch/kl", (bounded.expm1() - bounded).sum().item(), num_tokens)


def report_versions(versions: Jagged, mask: Array) -> None:
    """Metrics of the weight versions that have written the trained tokens, of which `mask` (T,) is True.

    The engine knows the version in training and makes `staleness/mean` and `staleness/max` of them. A span is a piece
    of a response by one version: a response that crosses a sync has two.
    """
    trained = versions.values[mask]
    if not len(trained):
        return
    metric("actor/policy_version/mean", trained.sum(), len(trained))
    metric("actor/policy_version/min", trained.min(), reduce="min")
    row = versions.row
    begins = np.ones(len(row), dtype=np.bool_)
    begins[1:] = (row[1:] != row[:-1]) | (versions.values[1:] != versions.values[:-1])
    rows = np.unique(row[mask])
    metric("staleness/spans", (begins & np.isin(row, rows)).sum(), len(rows))
