"""The loss of a critic, per token, on flat tensors of response tokens as `losses` has them."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Half the squared error (T,) of the value, or of the value kept within `clip` of the old one, if that is larger.

    So a value gains nothing by moving further than that from where the critic had it when the batch began. PPO,
    arXiv:1707.06347, as in its authors' code; an infinite `clip` is plain regression.
    """
    kept = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return torch.maximum((values - returns).square(), (kept - returns).square()) / 2
