"""Log-probabilities of responses under a causal language model: the same function for old, reference and update.

What a model says of tokens, which `scores_of` finds, may be another thing than that (`value_head`).

A prompt that several responses share, as all of a group do, is computed once: the model reads the distinct prompts, its
keys and values are handed to each response, and then it reads the responses. Gradients flow through both passes.
Prompts are padded on the left, responses on the right; the last response token, which predicts nothing, is never fed.
Logits are made for response tokens only, some at a time (`chunked`), and for a backward pass once more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flowrl.nodes._backend.chunked import Entropy, Scoring, in_parts
from flowrl.nodes._backend.head import Tail, Wanted, scored, tail_of, unwrapped
from flowrl.nodes._backend.inputs import distinct, flat, padded_inputs, positions_of
from flowrl.nodes._backend.weights import is_sharded
from flowrl.partition import Prompts
from flowrl.rows import Jagged

Score = Callable[[Callable[[], Any], Wanted], tuple[Any, tuple[Tensor, ...]]]
"""Of a call of the model and the tokens that it is asked about: what the call returns, and columns (T,) about them."""


def token_log_probs(
    model: nn.Module, prompts: Jagged, responses: Jagged, temperature: float, entropy: Entropy = "none"
) -> tuple[Tensor, Tensor | None]:
    """Log-probability (T,) of each response token at the temperature, and the entropy (T,) there; float32, row by row.

    An entropy has a gradient only where that is asked for. Gradients flow unless the caller switched them off. `model`
    is any `AutoModelForCausalLM`, also wrapped (DDP, FSDP): it is only ever called. With rows but no response tokens
    the model still runs, so that a rank stays in step and the empty result stays connected to the graph; without rows
    it does not run.
    """
    assert temperature > 0, "a training temperature of 0 is refused when the pipeline is checked"
    score = partial(_score, model, Scoring(temperature, entropy))
    log_probs, entropies = scores_of(model, prompts, responses, score, 2)
    return log_probs, None if entropy == "none" else entropies


def scores_of(model: nn.Module, prompts: Jagged, responses: Jagged, score: Score, num: int) -> tuple[Tensor, ...]:
    """The `num` columns (T,) of `score` about all response tokens, row by row, however the model is called for them."""
    assert len(prompts) == len(responses), "one prompt for each response"
    if len(prompts) == 0:
        return (torch.zeros(0, device=_device(model)),) * num
    assert prompts.lengths.min() > 0, "a response needs a prompt token that predicts its first token"
    cache = _shared_cache(model)
    if packs(model):
        return _packed_found(model, prompts, responses, score)
    if cache is None:
        return _found(model, prompts, responses, score)
    return _shared_found(model, prompts, responses, score, cache)


def shared_prompts(model: nn.Module, prompts: Jagged) -> Prompts:
    """What the model reads once for several rows: each distinct prompt, or none of them where it cannot share any."""
    same = np.arange(len(prompts)) if _shared_cache(model) is None else distinct(prompts)[1]
    return Prompts(prompts.lengths, same, packs(model))


def packs(model: nn.Module) -> bool:
    """Whether rows need no padding, as attention tells them apart by positions that start again.

    Flash attention does, which runs on CUDA alone: there this is unproven. Layers that keep other than keys and values
    would carry something from one row to the next.
    """
    config = getattr(unwrapped(model), "config", None)
    return str(getattr(config, "_attn_implementation", "")).startswith("flash_") and _empty_cache(model) is not None


def _found(model: nn.Module, prompts: Jagged, responses: Jagged, score: Score) -> tuple[Tensor, ...]:
    """In one pass over prompts and responses."""
    ids, mask = padded_inputs(prompts, responses)
    width = max(int(responses.lengths.max()), 1)
    wanted = _wanted(model, responses.row, width - positions_of(responses), flat(responses), _all(responses))
    options = {"logits_to_keep": width, "use_cache": False}
    return score(partial(_call, model, ids, mask, ids.shape[1], options), wanted)[1]


def _packed_found(model: nn.Module, prompts: Jagged, responses: Jagged, score: Score) -> tuple[Tensor, ...]:
    """All rows one after the other as one; each starts at position 0 again."""
    fed = Jagged.of([np.concatenate([p, r[:-1]]) for p, r in zip(prompts, responses, strict=True)], np.int64)
    ids, positions = (torch.from_numpy(each)[None].to(_device(model)) for each in (fed.values, positions_of(fed)))
    before = fed.offsets[responses.row] + prompts.lengths[responses.row] - 1 + positions_of(responses)
    wanted = _wanted(model, np.zeros_like(before), len(fed.values) - before, flat(responses), _all(responses))
    call = partial(model, input_ids=ids, position_ids=positions, use_cache=False)
    return score(call, wanted)[1]


def _shared_found(model: nn.Module, prompts: Jagged, responses: Jagged, score: Score, cache: Any) -> tuple[Tensor, ...]:
    """Each distinct prompt read once; `cache` is empty and of a kind that can be handed on."""
    once, index = distinct(prompts)
    nothing = Jagged(np.zeros(0, np.int64), np.zeros(len(once) + 1, np.int64))
    ids, mask = padded_inputs(once, nothing)
    options = {"past_key_values": cache, "use_cache": True}
    row, position, targets = responses.row, positions_of(responses), flat(responses)
    first = position == 0
    begins, follows = np.flatnonzero(first), np.flatnonzero(~first)
    call = partial(_call, model, ids, mask, ids.shape[1], {**options, "logits_to_keep": 1})
    wanted = _wanted(model, index[row[first]], position[first] + 1, targets[first], begins)
    output, begun = score(call, wanted)
    width = int(responses.lengths.max(initial=0))
    # Ranks that share a model's weights call it equally often, or they would wait for each other for ever.
    width = max(width, 2) if is_sharded(unwrapped(model)) else width
    if width <= 1:
        return begun
    chosen = torch.from_numpy(index).to(_device(model))
    for layer in output.past_key_values.layers:
        # `batch_select_indices` indexes, and the backward pass of that adds up in an order that varies with threads
        layer.keys, layer.values = (part.index_select(0, chosen) for part in (layer.keys, layer.values))
    fed = np.arange(width - 1) < (responses.lengths - 1)[:, None]
    ids = np.zeros(fed.shape, dtype=np.int64)
    ids[fed] = targets[position < (responses.lengths - 1)[row]]
    call = partial(_call, model, ids, np.concatenate([mask[index], fed], axis=1), width - 1, options)
    wanted = _wanted(model, row[~first], width - position[~first], targets[~first], follows)
    _, continued = score(call, wanted)
    # Row by row again: the first token of each, then those that follow it.
    order = torch.from_numpy(np.argsort(np.concatenate([begins, follows])))
    order = order.to(chosen.device)
    return tuple(torch.cat(parts).index_select(0, order) for parts in zip(begun, continued, strict=True))


def _wanted(model: nn.Module, row: NDArray[Any], back: NDArray[Any], targets: NDArray[Any], at: NDArray[Any]) -> Wanted:
    return Wanted(*(torch.from_numpy(each).to(_device(model)) for each in (row, back, targets, at)))


def _all(responses: Jagged) -> NDArray[Any]:
    return np.arange(len(responses.row))


def _score(
    model: nn.Module, scoring: Scoring, call: Callable[[], Any], wanted: Wanted
) -> tuple[Any, tuple[Tensor, ...]]:
    """What `call` of the model returns, and what it says of the tokens.

    A model that does something of its own with its logits makes all of them; they are read some at a time.
    """
    tail = tail_at(model)
    if tail is not None:
        output = scored(model, call, wanted, replace(scoring, scale=tail.scale, cap=tail.cap))
        return output, output.logits[0].unbind(-1)
    output = call()
    logits = wanted.of(output.logits)
    return output, in_parts(scoring.of, logits, wanted.targets, scoring, logits.shape[-1])


def tail_at(model: nn.Module) -> Tail | None:
    """What the model makes of the output of its head; None if only the logits that it makes itself will do."""
    return tail_of(model, partial(_call, model, np.zeros((1, 1), np.int64), np.ones((1, 1)), 1, {"use_cache": False}))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _call(model: nn.Module, ids: NDArray[Any], mask: NDArray[Any], num_columns: int, options: Mapping[str, Any]) -> Any:
    """Call the model on the last `num_columns` columns that the mask describes."""
    device = _device(model)
    attention_mask = torch.from_numpy(mask.astype(np.int64)).to(device)
    # Given explicitly: absolute positions would otherwise count the padding on the left.
    positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -num_columns:]
    return model(
        input_ids=torch.from_numpy(ids).to(device), attention_mask=attention_mask, position_ids=positions, **options
    )


def _shared_cache(model: nn.Module) -> Any:
    """An empty cache in which a prompt is read once for all its responses; None where each row reads its own."""
    # Layers that are computed again in the backward pass take no cache.
    recomputed = getattr(unwrapped(model), "is_gradient_checkpointing", False)
    return None if recomputed or packs(model) else _empty_cache(model)


def _empty_cache(model: nn.Module) -> Any:
    """A cache whose rows can be repeated; None for models that keep other than plain keys and values of all tokens."""
    from transformers import DynamicCache, PretrainedConfig
    from transformers.cache_utils import DynamicLayer

    config = getattr(unwrapped(model), "config", None)
    if not isinstance(config, PretrainedConfig):
        return None
    cache = DynamicCache(config=config)
    return cache if cache.layers and all(type(layer) is DynamicLayer for layer in cache.layers) else None
