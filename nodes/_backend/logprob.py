"""Log-probabilities of responses under a causal language model: the same function for old, reference and update.

A prompt that several responses share, as all of a group do, is computed once: the model reads the distinct prompts, its
keys and values are handed to each response, and then it reads the responses. Gradients flow through both passes.
Prompts are padded on the left, responses on the right; logits are computed for response tokens only, and the last
response token, which predicts nothing, is never fed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowrl.nodes._backend.losses import entropy_of
from flowrl.nodes._backend.weights import is_sharded
from flowrl.rows import Jagged

Entropy = Literal["none", "value", "gradient"]


def token_log_probs(
    model: nn.Module, prompts: Jagged, responses: Jagged, temperature: float, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (T,) of each response token at the temperature, and the entropy (T,) there; float32, row by row.

    An entropy that is only looked at costs no memory for a backward pass; ask for its `gradient` where it is trained.
    Gradients flow unless the caller switched them off. `model` is any `AutoModelForCausalLM`, also wrapped (DDP, FSDP):
    it is only ever called. With rows but no response tokens the model still runs, so that a rank stays in step and the
    empty result stays connected to the graph; without rows it does not run.
    """
    assert temperature > 0, "a training temperature of 0 is refused when the pipeline is checked"
    assert len(prompts) == len(responses), "one prompt for each response"
    device = next(model.parameters()).device
    if len(prompts) == 0:
        return torch.zeros(0, device=device), torch.zeros(0, device=device) if entropy != "none" else None
    assert prompts.lengths.min() > 0, "a response needs a prompt token that predicts its first token"
    cache = _empty_cache(model)
    logits = _logits(model, prompts, responses) if cache is None else _shared_logits(model, prompts, responses, cache)
    # In place: what it divides is a copy already, and the backward pass of copying does not look at it.
    vocabulary = torch.log_softmax(logits.float().div_(temperature), dim=-1)
    targets = torch.from_numpy(_flat(responses)).to(device)
    log_probs = vocabulary.gather(1, targets.unsqueeze(1)).squeeze(1)
    if entropy == "none":
        return log_probs, None
    return log_probs, entropy_of(vocabulary if entropy == "gradient" else vocabulary.detach())


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


def _logits(model: nn.Module, prompts: Jagged, responses: Jagged) -> Tensor:
    """Logits (T, vocabulary) in one pass over prompts and responses."""
    ids, mask = padded_inputs(prompts, responses)
    width = max(int(responses.lengths.max()), 1)
    output = _call(model, ids, mask, ids.shape[1], {"logits_to_keep": width, "use_cache": False})
    # The slice changes nothing where the model honoured logits_to_keep; a few ignore it.
    logits: Tensor = output.logits[:, -width:].flatten(0, 1)
    return logits.index_select(0, torch.from_numpy(responses.row * width + _position(responses)).to(logits.device))


def _shared_logits(model: nn.Module, prompts: Jagged, responses: Jagged, cache: Any) -> Tensor:
    """Logits (T, vocabulary), each distinct prompt read once; `cache` is empty and of a kind that can be handed on."""
    distinct, index = _distinct(prompts)
    nothing = Jagged(np.zeros(0, np.int64), np.zeros(len(distinct) + 1, np.int64))
    ids, mask = padded_inputs(distinct, nothing)
    options = {"past_key_values": cache, "use_cache": True}
    output = _call(model, ids, mask, ids.shape[1], {**options, "logits_to_keep": 1})
    chosen = torch.from_numpy(index).to(output.logits.device)
    logits: Tensor = output.logits[:, -1].index_select(0, chosen)
    width = int(responses.lengths.max(initial=0))
    if is_sharded(model):
        width = max(width, 2)  # ranks call the model equally often, or they would wait for each other for ever
    if width > 1:
        for layer in output.past_key_values.layers:
            # `batch_select_indices` indexes, and the backward pass of that adds up in an order that varies with threads
            layer.keys, layer.values = (part.index_select(0, chosen) for part in (layer.keys, layer.values))
        column = np.arange(width - 1)
        fed = column < (responses.lengths - 1)[:, None]
        ids_fed = np.zeros(fed.shape, dtype=np.int64)
        ids_fed[fed] = np.delete(
            _flat(responses), responses.offsets[1:][responses.lengths > 0] - responses.offsets[0] - 1
        )
        output = _call(model, ids_fed, np.concatenate([mask[index], fed], axis=1), width - 1, options)
        # Row by row: the token after the prompt, then those after each response token that was fed.
        logits = torch.cat([logits.unsqueeze(1), output.logits], dim=1).flatten(0, 1)
    place = responses.row * max(width, 1) + _position(responses)
    return logits.index_select(0, torch.from_numpy(place).to(logits.device))


def _call(model: nn.Module, ids: NDArray[Any], mask: NDArray[Any], num_columns: int, options: Mapping[str, Any]) -> Any:
    """Call the model on the last `num_columns` columns that the mask describes."""
    device = next(model.parameters()).device
    attention_mask = torch.from_numpy(mask.astype(np.int64)).to(device)
    # Given explicitly: absolute positions would otherwise count the padding on the left.
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -num_columns:]
    return model(
        input_ids=torch.from_numpy(ids).to(device), attention_mask=attention_mask, position_ids=positions, **options
    )


def _empty_cache(model: nn.Module) -> Any:
    """A cache whose rows can be repeated; None for models that keep other than plain keys and values of all tokens."""
    from transformers import DynamicCache, PretrainedConfig
    from transformers.cache_utils import DynamicLayer

    module = getattr(model, "module", model)
    config = getattr(module, "config", None)
    # Layers that are computed again in the backward pass take no cache.
    if not isinstance(config, PretrainedConfig) or getattr(module, "is_gradient_checkpointing", False):
        return None
    cache = DynamicCache(config=config)
    return cache if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers) else None


def _distinct(prompts: Jagged) -> tuple[Jagged, NDArray[np.int64]]:
    """The distinct prompts, and which of them each row has."""
    seen: dict[bytes, int] = {}
    index = np.array([seen.setdefault(prompt.tobytes(), len(seen)) for prompt in prompts], dtype=np.int64)
    return prompts.take(np.unique(index, return_index=True)[1]), index


def _position(responses: Jagged) -> NDArray[np.int64]:
    """The position (T,) of each response token in its row."""
    position: NDArray[np.int64] = (
        np.arange(responses.offsets[0], responses.offsets[-1]) - responses.offsets[responses.row]
    )
    return position


def _flat(jagged: Jagged) -> NDArray[Any]:
    """The values of the rows alone, where the array holds more than them; a copy, as torch wants writable memory."""
    return np.array(jagged.values[jagged.offsets[0] : jagged.offsets[-1]], dtype=np.int64)
