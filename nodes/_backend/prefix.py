"""What a model has read of the sessions of a batch, kept as long as its weights stay.

Sessions that have the same prompt and have drawn the same tokens so far are one *branch*: it is computed once, however
many sessions share it. So a prompt is prefilled once for its whole group, and a confident policy costs little.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowrl.nodes._backend.drawn import Drawn
from flowrl.rows import Array, Jagged


class Prefix(NamedTuple):
    """What the model has seen of B branches, and what it expects next."""

    cache: Any
    """Keys and values (`transformers.DynamicCache`)."""
    mask: Tensor
    """(B, columns) 1 where a column holds a token: prompts are padded on the left."""
    length: Tensor
    """(B,) tokens seen."""
    logits: Tensor
    """(B, vocabulary) of the next token."""


class Reader:
    """Reads the prompts of a batch, then what its sessions draw, token by token; from the start after `forget`."""

    def __init__(self, model: Any, device: str, prompts: Jagged, drawn: Drawn) -> None:
        self._model, self._device, self._prompts, self._drawn = model, device, prompts, drawn
        self._prefix: Prefix | None = None
        self._branch, self._sessions = drawn.request, drawn.active

    def forget(self) -> None:
        """Give the memory back; what was read is computed anew, from the weights that the model has then."""
        self._prefix = None

    def next_logits(self) -> tuple[Tensor, Array]:
        """The logits (B, vocabulary) of the next token of each branch, and the branch (A,) of each active session."""
        if self._prefix is None:
            self._prefix, self._branch = self._prefill()
        else:
            branch = self._branch[np.isin(self._sessions, self._drawn.active)]
            ids = self._drawn.ids[self._drawn.active, self._drawn.num_drawn - 1]
            self._prefix, self._branch = self._extend(self._prefix, branch, ids)
        self._sessions = self._drawn.active
        return self._prefix.logits, self._branch

    # inference_mode is entered for each pass, not around the loop: across a `yield` it would leak to the caller.
    @torch.inference_mode()
    def _prefill(self) -> tuple[Prefix, Array]:
        """Read what the active sessions consist of so far."""
        request, ids = self._drawn.request[self._drawn.active], self._drawn.so_far
        branch = request
        for column in ids.T:
            branch = np.unique(branch * (ids.max() + 1) + column, return_inverse=True)[1]
        _, first, branch = np.unique(branch, return_index=True, return_inverse=True)
        read = [np.concatenate([self._prompts[request[session]], ids[session]]) for session in first]
        return self._forward(*self._padded(Jagged.of(read, np.int64)), None), branch

    def _padded(self, branches: Jagged) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, positions and mask, each (B, longest), on the model's device."""
        width = int(branches.lengths.max())
        mask = torch.from_numpy(np.arange(width) >= width - branches.lengths[:, None]).to(self._device)
        ids = torch.zeros(mask.shape, dtype=torch.int64, device=self._device)
        ids[mask] = torch.from_numpy(branches.values).to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        return ids, positions, mask.long()

    @torch.inference_mode()
    def _extend(self, prefix: Prefix, branch: Array, ids: Array) -> tuple[Prefix, Array]:
        """Feed the ids that sessions on these branches have drawn; the new prefix, and each session's branch of it."""
        distinct, branch = np.unique(branch * prefix.logits.shape[1] + ids, return_inverse=True)
        parents, tokens = (torch.from_numpy(part).to(self._device) for part in divmod(distinct, prefix.logits.shape[1]))
        prefix.cache.batch_select_indices(parents)
        length = prefix.length[parents]
        mask = torch.cat([prefix.mask[parents], prefix.mask.new_ones(len(parents), 1)], dim=1)
        return self._forward(tokens[:, None], length[:, None], mask, prefix.cache), branch

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor, cache: Any) -> Prefix:
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        if getattr(output, "past_key_values", None) is None:
            raise TypeError(f"{type(self._model).__name__} keeps no keys and values, which this engine generates from")
        return Prefix(output.past_key_values, mask, positions[:, -1] + 1, output.logits[:, -1])


@torch.inference_mode()
def sample(logits: Tensor, branch: Array, uniform: Array, temperature: float) -> tuple[Array, Array]:
    """A token id (S,) int64 for each session and its log-probability (S,) float32, by the inverse of the distribution.

    `logits` (B, V) are those of the branches, `branch` (S,) says which a session is on, `uniform` (S,) is its draw. At
    temperature 0 it is the likeliest token, the first of several, with its log-probability at 1.
    """
    log_probs = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    cumulative = log_probs.exp().cumsum(dim=-1)
    where = torch.from_numpy(branch).to(logits.device)
    total = cumulative[where, -1]
    if not bool(torch.isfinite(total).all()):
        raise FloatingPointError("the model's logits are not finite: its weights hold NaN or infinity")
    if temperature == 0:
        likeliest = log_probs[where].argmax(dim=-1)
        return likeliest.cpu().numpy(), log_probs[where, likeliest].cpu().numpy()
    draw = torch.from_numpy(uniform).to(logits.device, torch.float32) * total
    # Rounding may lift the draw to the total, and no token lies beyond it.
    draw = torch.minimum(draw, torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative[where], draw[:, None], right=True).squeeze(1)
    return ids.cpu().numpy(), log_probs[where, ids].cpu().numpy()
