"""Responses that were cut off at the token limit, left out of the loss.

What a response would have become is not known when it is cut, so its reward says little of its tokens: Yu et al.,
DAPO, arXiv:2503.14476, section 3.4 (overlong filtering). Its reward still counts in the statistics of its group. Of a
session of several outputs the reward is that of the last: if that is cut, nothing of the session is trained on; if an
earlier one is, that one is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowrl.batch import Sample, Token
from flowrl.metrics import metric
from flowrl.node import Node
from flowrl.nodes._backend.sessions import sessions


class Truncated(Node):
    """Mask responses that were cut off by the token limit, and sessions whose last response was."""

    class Out(NamedTuple):
        corrected_mask: Token[bool]

    def run(self, finish_reason: Sample[str], response_mask: Token[bool], other_mask: Token[bool] | None = None) -> Out:
        rows = response_mask.rows
        session_of, last = sessions(rows)
        cut = np.array([reason == "length" for reason in finish_reason], dtype=np.bool_)
        metric("groups/truncated", len(np.unique(session_of[cut])), reduce="sum")
        kept = response_mask & Sample(rows, ~(cut | cut[last][session_of])).per_token(response_mask)
        return self.Out(kept if other_mask is None else kept & other_mask)
