"""Values of response tokens under a critic (`value_head`), read as log-probabilities are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from flowrl.nodes._backend.head import Wanted, read_off
from flowrl.nodes._backend.logprob import scores_of
from flowrl.rows import Jagged


def token_values(model: nn.Module, prompts: Jagged, responses: Jagged) -> Tensor:
    """The value (T,) of the state before each response token, float32, row by row; else as `token_log_probs`."""
    return scores_of(model, prompts, responses, partial(_score, model), 1)[0]


def _score(model: nn.Module, call: Callable[[], Any], wanted: Wanted) -> tuple[Any, tuple[Tensor, ...]]:
    output = read_off(model, call, lambda head, hidden, _: (head.forward(wanted.of(hidden))[:, 0],))
    return output, output.logits[0].unbind(-1)
