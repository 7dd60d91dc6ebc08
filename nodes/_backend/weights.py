"""Weights on their way from the training model to an engine: named numpy arrays, each tied tensor once."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flowrl.rows import Array


class WeightsError(ValueError):
    """Weights do not fit the model that should take them; the message names the first that does not."""


@dataclass(frozen=True)
class Weights:
    """All weights of a model. numpy knows no bfloat16: such an array travels as its 16 bits, `dtypes` tells."""

    arrays: Mapping[str, Array]
    dtypes: Mapping[str, str]
    checksum: str = ""
    """Digest of names and bytes; empty where nobody asked for it."""


def pack(module: nn.Module, dtype: str, checksum: bool = False) -> Weights:
    """The weights, floats cast to `dtype`.

    On a CPU and without a cast they share the model's memory: send them before the next update.
    """
    arrays, dtypes = {}, {}
    for name, tensor in named_weights(module).items():
        tensor = tensor.detach()
        tensor = tensor.to("cpu", getattr(torch, dtype)) if tensor.is_floating_point() else tensor.cpu()
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        arrays[name] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).contiguous().numpy()
    return Weights(arrays, dtypes, checksum_of(arrays) if checksum else "")


@torch.no_grad()
def unpack(weights: Weights, module: nn.Module) -> None:
    """Copy the weights into the model. Raises `WeightsError`, nothing copied, if a name, type or shape does not fit."""
    targets = named_weights(module)
    for name in [*targets, *weights.arrays]:
        if name not in weights.arrays:
            raise WeightsError(f"the engine's weight '{name}' was not sent")
        if name not in targets:
            raise WeightsError(f"the weight '{name}' was sent, but the engine's model has none of that name")
        sent, here = (weights.dtypes[name], weights.arrays[name].shape), targets[name]
        if sent != (str(here.dtype).removeprefix("torch."), tuple(here.shape)):
            raise WeightsError(f"the weight '{name}' is {here.dtype} {tuple(here.shape)} here, but {sent} was sent")
    for name, target in targets.items():
        target.copy_(_tensor(weights.arrays[name], target.dtype))


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that are saved with them."""
    parameters = dict(module.named_parameters())
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return parameters | {name: value for name, value in module.state_dict().items() if name not in tied}


def checksum_of(arrays: Mapping[str, Array]) -> str:
    """Digest of names and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        digest.update(name.encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()


def _tensor(array: Array, dtype: torch.dtype) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # arrays from the object store are read-only, and only read here
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor
