"""How far the rollout engine and the trainer are apart."""

from __future__ import annotations

from torch import Tensor

from flowrl.metrics import metric
from flowrl.nodes._backend.losses import MAX_LOG_RATIO


def report_mismatch(difference: Tensor, num_tokens: float) -> None:
    """Metrics of the (T,) log ratios of trainer to engine, which are 0 outside the mask."""
    bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metric("mismatch/log_ratio", difference.abs().sum().item(), num_tokens)
    metric("mismatch/kl", (bounded.expm1() - bounded).sum().item(), num_tokens)
