"""DAPO's penalty for responses that come near the limit, or are cut off at it.

Source: Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, 2025, equation 13: with the limit
L_max and a buffer L_cache before it, a response of y tokens gets

    0                                   y <= L_max - L_cache
    ((L_max - L_cache) - y) / L_cache   up to L_max
    -1                                  beyond

Here times `factor`, and as a field of its own, to be added up by `reward.weighted_sum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from pydantic import Field

from flowrl.batch import Sample, Step, Token
from flowrl.node import Node


class OverlongPenalty(Node):
    """0 for responses that keep clear of the token limit, falling linearly to -factor at the limit (DAPO)."""

    buffer: int = Field(ge=1)
    """Tokens before the rollout's `max_tokens` over which the penalty grows."""
    factor: float = Field(1.0, gt=0)
    """Penalty of a response as long as the limit."""

    class Out(NamedTuple):
        overlong_penalty: Sample[float]

    def refuses_writers(self, writers: Mapping[str, Node]) -> str:
        limit = getattr(writers.get("max_tokens"), "max_tokens", None)
        return _too_long(self.buffer, limit) if isinstance(limit, int) else ""

    def run(self, response_mask: Token[bool], max_tokens: Step[int]) -> Out:
        if refusal := _too_long(self.buffer, max_tokens.value):
            raise ValueError(refusal)
        lengths = response_mask.sum("sample").values.astype(np.float64)
        excess = lengths - (max_tokens.value - self.buffer)
        penalty = -np.clip(excess / self.buffer, 0.0, 1.0) * self.factor
        return self.Out(Sample(response_mask.rows, penalty + 0.0))  # no -0.0


def _too_long(buffer: int, limit: int) -> str:
    return f"buffer: {buffer} is longer than a response may be (max_tokens: {limit})" if buffer > limit else ""
