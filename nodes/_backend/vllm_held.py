"""What a vLLM model really holds of the weights that it was sent, read back from its layers.

vLLM fuses some weights into one, pads vocabularies, and on a CPU packs matrices for its kernels and keeps nothing else:
such a matrix is read by multiplying it with the identity, which gives its values exactly. What cannot be read, such as
the part that a process of several holds, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from flowrl.nodes._backend.weights import Kind, array_of, checksum_of, name_of

Ties = Mapping[str, str]
"""Parameters that are the same as one of another layer: that one's name."""


def ties(model: nn.Module) -> dict[str, str]:
    """The tied parameters of a model that is not being reloaded."""
    first: dict[int, str] = {}
    found = {}
    for layer_name, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            full = f"{layer_name}.{name}"
            if first.setdefault(id(parameter), full) != full:
                found[full] = first[id(parameter)]
    return found


def pack_again(model: nn.Module, tied: Ties) -> None:
    """A reload changes a tied parameter in place, but packs it anew for the kernel of the other layer alone."""
    for layer_name in {name.rpartition(".")[0] for name in tied}:
        layer = model.get_submodule(layer_name)
        method = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)


def held_weights(model: nn.Module, sent: Mapping[str, Kind], tied: Ties) -> Iterator[tuple[str, list[list[str]]]]:
    """For each sent weight that can be read, the digest of every copy that the model computes with.

    A copy of a square matrix has two digests, for it may be stored either way.
    """
    layers = dict(model.named_modules())
    for target, names in _targets(model, sent).items():
        copies = []
        for same in [target, *(name for name, other in tied.items() if other == target)]:
            layer_name, _, attribute = same.rpartition(".")
            copies += list(_copies(layers.get(layer_name), attribute, sent[names[0]]))
        start = 0
        num_rows = sum(sent[name].shape[0] for name in names if sent[name].shape)
        for name in names:
            kind, rows = sent[name], slice(start, start + sent[name].shape[0]) if sent[name].shape else ...
            start += kind.shape[0] if kind.shape else 0
            fitting = (copy for copy in copies if not copy.ndim or len(names) == 1 or len(copy) == num_rows)
            parts = [part for copy in fitting for part in _as_sent(copy, rows, kind)]
            if parts:
                yield name, [_digests(part) for part in parts]


def incomplete(model: nn.Module, sent: Mapping[str, Kind], tied: Ties) -> list[str]:
    """Weights of which a model that is being reloaded has not got all; asked before the reload is finalized."""
    found = []
    for layer_name, layer in model.named_modules():
        info, parameters = get_layerwise_info(layer), dict(layer.named_parameters(recurse=False))
        if not parameters or not info.can_load():  # a layer that has got everything is done
            continue
        needed = 1 if isinstance(layer, VocabParallelEmbedding) else sum(map(torch.numel, parameters.values()))
        if info.load_numel < needed:
            for full in (f"{layer_name}.{name}" for name in parameters):
                found += [part for part in _parts(model, full) if part not in sent and full not in tied]
    return found


def forget_half_an_update(model: nn.Module) -> None:
    """Where an update broke off, let layers that wait for the rest of it have their old weights back when it ends."""
    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def _stacked(model: nn.Module) -> Mapping[str, tuple[str, Any]]:
    """Parts of names that are fused: for each the part that takes its place, and where in it it lies."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    stacked: Mapping[str, tuple[str, Any]] = mapper.orig_to_new_stacked if mapper is not None else {}
    return stacked


def _parts(model: nn.Module, target: str) -> list[str]:
    """The names under which a parameter is sent."""
    parts = [target.replace(new, old) for old, (new, _) in _stacked(model).items() if new in target]
    return parts or [target]


def _targets(model: nn.Module, sent: Mapping[str, Kind]) -> dict[str, list[str]]:
    """For each parameter the sent weights that it is made of, in the order of its rows."""
    mapper, order = getattr(model, "hf_to_vllm_mapper", None), list(_stacked(model))
    found: dict[str, list[tuple[int, str]]] = {}
    for name in sent:
        target = mapper.map_name(name) if mapper is not None else name
        place = next((position for position, part in enumerate(order) if part in name), 0)
        found.setdefault(str(target), []).append((place, name))
    return {target: [name for _, name in sorted(members)] for target, members in found.items()}


def _copies(layer: Any, attribute: str, kind: Kind) -> Iterator[Tensor]:
    """What a layer keeps of a parameter: the parameter itself, and the matrix that its kernel has packed."""
    if getattr(layer, "tp_size", 1) > 1:
        return  # a part of it, here with padding
    value = getattr(layer, attribute, None)
    if isinstance(value, Tensor) and value.numel() and name_of(value.dtype) == kind.dtype:
        yield value.detach()
    if attribute == "weight" and hasattr(layer, "cpu_linear") and len(kind.shape) == 2:
        width = getattr(layer, "input_size_per_partition", kind.shape[1])
        identity = torch.eye(width, dtype=getattr(torch, kind.dtype))
        with torch.inference_mode():
            yield layer.quant_method.apply(layer, identity, None).t()


def _as_sent(copy: Tensor, rows: Any, kind: Kind) -> Iterator[Tensor]:
    """The rows of a copy that are one sent weight, where they have its shape, or that of its transpose."""
    part = copy[rows] if copy.ndim else copy
    if tuple(part.shape) == kind.shape:
        yield part
    elif tuple(copy.t().shape) == kind.shape if copy.ndim == 2 else False:
        yield copy.t()


def _digests(part: Tensor) -> list[str]:
    square = part.ndim == 2 and part.shape[0] == part.shape[1]
    return [checksum_of(array_of(each)) for each in ([part, part.t()] if square else [part])]
