"""Factors of several rewards, in the order of `reads: {rewards: [...]}`."""

from __future__ import annotations

from collections.abc import Sequence


def refusal(coefficients: Sequence[float] | None, rewards: Sequence[str]) -> str:
    """Why these factors do not go with the rewards that are read; empty if there are rewards, and one for each."""
    num_rewards = len(rewards)
    if num_rewards == 0 or len(coefficients or rewards) != num_rewards:
        return f"{len(coefficients or ())} coefficients for {num_rewards} rewards: give one for each"
    return ""
