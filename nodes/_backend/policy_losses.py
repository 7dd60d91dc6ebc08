"""The policy losses that `update.policy` takes by name, each a function of what a token knows, on flat tensors.

Contract: the parameters of a loss name what it takes. `log_probs`, `old_log_probs`, `advantages` are `(T,)` tensors of
the tokens of whole trajectories, 0 outside of `mask` (T,), where nothing counts; `row` (T,) names the trajectory of
each. Every other parameter is a setting, with the default of the paper. A loss returns its value for each token (T,),
or that and (T,) bool where a clip decided it. What it does with one trajectory depends on no other.

With r = exp(log_probs - old_log_probs) the probability ratio to the anchor, whose logarithm is clamped to ±20 before
the exponential (we depart from all papers in that), and A the advantage. Nothing here imports torch, so that settings
can be checked without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl.nodes._backend.terms import MAX_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor


def clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> tuple[Tensor, Tensor]:
    """-min(rA, clip(r, 1 - low, 1 + high) A), and for A < 0 at most -dual_clip * A.

    PPO, arXiv:1707.06347, equation 7; dual clip, arXiv:1912.09729; low below high, DAPO, arXiv:2503.14476.
    """
    assert dual_clip > 1.0 + clip_high, "the dual clip lies above the clip of the ratio"
    loss, unclipped = _surrogate(_ratio(log_probs - old_log_probs), advantages, clip_low, clip_high)
    loss = loss.minimum(-dual_clip * advantages).where(advantages < 0, loss)
    return loss, loss.detach() != unclipped.detach()


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    row: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[Tensor, Tensor]:
    """-min(sA, clip(s, 1 - low, 1 + high) A) with s the geometric mean of the ratios of the whole trajectory.

    GSPO, arXiv:2507.18071, equation 5, in its form for tokens (equations 13 and 14), which lets advantages differ
    within a trajectory, and has the same gradient where they do not.
    """
    of_row = row_mean((log_probs - old_log_probs).detach(), mask, row)
    ratio = _ratio(log_probs - log_probs.detach() + of_row)
    loss, unclipped = _surrogate(ratio, advantages, clip_low, clip_high)
    return loss, loss.detach() != unclipped.detach()


def cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[Tensor, Tensor]:
    """-clip(r, 1 - low, 1 + high) A log_probs, without a gradient through the ratio: no token is left out.

    CISPO, MiniMax-M1, arXiv:2506.13585, equation 4. Its lower bound is off, as here; for the upper one, which it does
    not tell, we take the 5 of ScaleRL, arXiv:2510.13786.
    """
    ratio = _ratio(log_probs - old_log_probs).detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * log_probs, weight != ratio


def gpg(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-A log_probs: the plain policy gradient, which knows no older policy.

    GPG, arXiv:2504.02546, without its factor for groups that carry no signal.
    """
    return -log_probs * advantages


def reinforce(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Tensor:
    """-rA, never clipped: REINFORCE, whose gradient stays unbiased when the policy has moved from its anchor.

    Williams, 1992; with the ratio as importance weight, Degris et al., arXiv:1205.4839. Where r = 1 it is `gpg`.
    """
    return -_ratio(log_probs - old_log_probs) * advantages


def sapo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with a tau for A > 0 and another one else: a clip that fades in.

    SAPO, arXiv:2511.20347. A greater tau holds r nearer to 1.
    """
    ratio = _ratio(log_probs - old_log_probs)
    positive, negative = (_soft_gate(ratio, tau) for tau in (tau_positive, tau_negative))
    return -positive.where(advantages > 0, negative) * advantages


def geo_mean(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    mask: Tensor,
    row: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> tuple[Tensor, Tensor]:
    """-A times the geometric mean of the ratios of a trajectory, each clipped to exp(-low) and exp(high) as by PPO.

    GMPO, arXiv:2507.20673. A is the mean of the trajectory's advantages, and all of its tokens have its one
    value: only a mean over them gives the paper's loss.
    """
    log_ratio = (log_probs - old_log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    bounded = log_ratio.clamp(-clip_low, clip_high)
    kept = log_ratio.maximum(bounded).where(advantages < 0, log_ratio.minimum(bounded))
    ratio = row_mean(kept, mask, row).exp()
    return -ratio * row_mean(advantages, mask, row), kept.detach() != log_ratio.detach()


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """-min(rA, clip(r, 1 - low, 1 + high) A), and -rA."""
    unclipped = -ratio * advantages
    return unclipped.maximum(-ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages), unclipped


def _soft_gate(ratio: Tensor, tau: float) -> Tensor:
    return (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)


def row_mean(values: Tensor, mask: Tensor, row: Tensor) -> Tensor:
    """At each token the mean over the masked tokens of its trajectory: (T,) -> (T,); added in float64."""
    num_tokens, counted = row.bincount(mask.double()), values.double().where(mask, 0.0)
    total = counted.new_zeros(len(num_tokens)).index_add(0, row, counted)
    return (total / num_tokens.clamp(min=1))[row].to(values.dtype)
