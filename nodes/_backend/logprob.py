"""Log-probabilities of responses under a causal language model: the same function for old, reference and update.

Rows meet at one column: prompts are padded on the left, responses on the right. So the model computes logits only for
the response columns, and the last response token, which predicts nothing, is never fed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowrl.nodes._backend.losses import entropy_of
from flowrl.rows import Jagged


def token_log_probs(
    model: nn.Module, prompts: Jagged, responses: Jagged, temperature: float, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (T,) of each response token at the temperature, and the entropy (T,) there; float32, row by row.

    Gradients flow unless the caller switched them off. `model` is any `AutoModelForCausalLM`, also wrapped (DDP, FSDP):
    it is only ever called. With rows but no response tokens the model still runs, so that a rank stays in step and the
    empty result stays connected to the graph; without rows it does not run.
    """
    assert temperature > 0, "a training temperature of 0 is refused when the pipeline is checked"
    assert len(prompts) == len(responses), "one prompt for each response"
    device = next(model.parameters()).device
    if len(prompts) == 0:
        return torch.zeros(0, device=device), torch.zeros(0, device=device) if with_entropy else None
    assert prompts.lengths.min() > 0, "a response needs a prompt token that predicts its first token"
    ids, mask = padded_inputs(prompts, responses)
    width = max(int(responses.lengths.max()), 1)
    attention_mask = torch.from_numpy(mask).to(device)
    output = model(
        input_ids=torch.from_numpy(ids).to(device),
        attention_mask=attention_mask,
        # Given explicitly: absolute positions would otherwise count the padding on the left.
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0),
        logits_to_keep=width,
        use_cache=False,
    )
    # The slice changes nothing where the model honoured logits_to_keep; a few ignore it.
    logits: Tensor = output.logits[:, -width:].flatten(0, 1)
    within_row = np.arange(responses.offsets[0], responses.offsets[-1]) - responses.offsets[responses.row]
    place = torch.from_numpy(responses.row * width + within_row).to(device)
    # In place: index_select has copied, and its backward pass does not look at the copy.
    scaled = logits.index_select(0, place).float().div_(temperature)
    vocabulary = torch.log_softmax(scaled, dim=-1)
    targets = torch.from_numpy(_flat(responses)).to(device)
    log_probs = vocabulary.gather(1, targets.unsqueeze(1)).squeeze(1)
    return log_probs, entropy_of(vocabulary) if with_entropy else None


def padded_inputs(prompts: Jagged, responses: Jagged) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids and attention mask, both (N, longest prompt + longest response - 1), int64.

    The column before the first response token is the same in all rows. Padding holds id 0, and is never attended to.
    """
    prompt_width, width = int(prompts.lengths.max()), max(int(responses.lengths.max()), 1)
    column = np.arange(prompt_width + width)
    start, stop = prompt_width - prompts.lengths, prompt_width + responses.lengths
    mask = (column >= start[:, None]) & (column < stop[:, None])
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[:, :prompt_width][mask[:, :prompt_width]] = _flat(prompts)
    ids[:, prompt_width:][mask[:, prompt_width:]] = _flat(responses)
    return ids[:, :-1], mask[:, :-1].astype(np.int64)


def _flat(jagged: Jagged) -> NDArray[Any]:
    """The values of the rows alone, where the array holds more than them; a copy, as torch wants writable memory."""
    return np.array(jagged.values[jagged.offsets[0] : jagged.offsets[-1]], dtype=np.int64)
