"""The losses of policy optimisation, per token and aggregated, on flat tensors of response tokens.

Contract: `(T,)` tensors hold the tokens of all rows one after the other, float32 (float64 keeps its precision); there
is no padding. A token outside the mask may hold anything, NaN and infinity too, if every column passes through `within`
first: masking afterwards would be too late, since 0 times infinity is NaN in the backward pass.

Shares: `aggregate` of a micro-batch, divided by the denominator of the *whole* mini-batch over all ranks, is its share
of the loss. Shares and their gradients are added, never averaged, so neither micro-batches nor ranks change the result.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from flowrl.nodes._backend.terms import MAX_K3, MAX_LOG_RATIO, Aggregation, KlKind


def within(mask: Tensor, column: Tensor) -> Tensor:
    """The column with 0 outside the mask, by selection: nothing outside it reaches a value or a gradient."""
    return torch.where(mask, column, 0.0)


def kl(log_probs: Tensor, ref_log_probs: Tensor, kind: KlKind) -> tuple[Tensor, Tensor]:
    """Estimate (T,) of the divergence from the reference, and (T,) bool where it was clamped (gradient 0 there).

    With d = log_probs - ref_log_probs: `k1` d, `k2` d²/2, `abs` |d|, never clamped; `k3` min(exp(-d) + d - 1, 10) on d
    clamped to ±20. Source: Schulman, "Approximating KL Divergence", 2020. `k1+` and `k3+` have the values of `k1` and
    `k3`, and everywhere the gradient of `k2`, whose mean over samples is that of the divergence; theirs is not.
    """
    difference = log_probs - ref_log_probs
    if kind == "k1+" or kind == "k3+":
        value, clamped = kl(log_probs.detach(), ref_log_probs, "k1" if kind == "k1+" else "k3")
        k2 = difference.square() / 2
        return value + (k2 - k2.detach()), clamped
    if kind == "k3":
        bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        estimate = torch.expm1(-bounded) + bounded  # expm1: exp(-d) - 1 cancels for the small d of a young policy
        return estimate.clamp(max=MAX_K3), estimate.detach() > MAX_K3
    unclamped = torch.zeros_like(difference, dtype=torch.bool)
    if kind == "k1":
        return difference, unclamped
    if kind == "k2":
        return difference.square() / 2, unclamped
    if kind == "abs":
        return difference.abs(), unclamped
    assert_never(kind)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Loss (T,) of a critic: max((V - R)², (clip(V, old - clip, old + clip) - R)²) / 2.

    A value that has moved from the old one by more than `clip` has no gradient, unless it is the worse for it. The clip
    of the value function is that of the code of PPO (arXiv:1707.06347), not of the paper.
    """
    near = values.clamp(old_values - clip, old_values + clip)
    return torch.maximum((values - returns).square(), (near - returns).square()) / 2


def entropy(logits: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits) over the last axis: (..., V) -> (...); a logit of -inf counts nothing."""
    return entropy_of(torch.log_softmax(logits, dim=-1))


def entropy_of(log_probs: Tensor) -> Tensor:
    """Entropy in nats of a distribution given by all its log-probabilities: (..., V) -> (...)."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)  # 0 * -inf would be NaN
    return -(log_probs.exp() * finite).sum(dim=-1)


def denominator(mask: Tensor, row: Tensor, mode: Aggregation, max_tokens: int) -> float:
    """What a mini-batch is divided by: trainable tokens, or rows with at least one (times `max_tokens`, if normed).

    Denominators of disjoint sets of rows add up, so ranks may count their own and sum. 0 means nothing to train on:
    skip the update. `row` (T,) names the row of each token.
    """
    trainable = row[mask]
    if mode == "token-mean":
        return float(trainable.numel())
    num_rows = float(torch.bincount(trainable).count_nonzero())
    return num_rows * max_tokens if mode == "seq-mean-token-sum-norm" else num_rows


def aggregate(token_values: Tensor, row: Tensor, mask: Tensor, mode: Aggregation, denominator: float) -> Tensor:
    """The scalar share of these tokens in the mini-batch's loss; 0, still connected to the graph, for an empty mask.

    All tokens of a row must be in the call. The denominator is that of the whole mini-batch over all ranks.
    """
    values = token_values[mask]
    assert denominator > 0 or values.numel() == 0, "trainable tokens here, but none in the whole mini-batch"
    if mode == "seq-mean-token-mean":
        trainable = row[mask]
        values = values / torch.bincount(trainable)[trainable]
    return values.sum() / (denominator or 1.0)
