"""Weights on their way from the training model to engines: buckets of named tensors, each tied tensor once.

An update is a stream of buckets. The first says what all of them will hold, so that an engine can refuse an update
before it has loaded any of it; only one bucket is ever copied or gathered at a time.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.rows import Array


class WeightsError(ValueError):
    """Weights do not fit the model that should take them, or are not those that were sent; the message names one."""


@dataclass(frozen=True)
class Kind:
    """Type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of all its values."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


Manifest = Mapping[str, Kind]
"""What every weight of an update is, by name."""


@dataclass(frozen=True)
class Update:
    """What an engine must know before the first bucket."""

    manifest: Manifest
    transport: str = "shm"
    """How tensors travel: `shm` in the bucket itself, `ipc` and `nccl` between devices."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """What the two sides of that transport agree on."""


@dataclass(frozen=True)
class Bucket:
    """Some weights of an update. numpy knows no bfloat16: such an array travels as its 16 bits, `kinds` tells."""

    kinds: Manifest
    arrays: Mapping[str, Array]
    """The tensors; none where the transport moves them itself."""
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Digest of each tensor's bytes; none where nobody asked for them."""
    handles: bytes = b""
    """Where another process finds the tensors on the device (`ipc`)."""
    begins: Update | None = None
    """In the first bucket: the update."""
    ends: bool = False
    """This is the last bucket."""


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that are saved with them."""
    parameters = dict(module.named_parameters())
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return parameters | {name: value for name, value in module.state_dict().items() if name not in tied}


def manifest_of(module: nn.Module, dtype: str = "") -> dict[str, Kind]:
    """What each weight of a model is, or will be when floats are cast to `dtype`; gathers nothing."""
    return {
        name: Kind(dtype if dtype and value.is_floating_point() else name_of(value.dtype), tuple(value.shape))
        for name, value in named_weights(module).items()
    }


def kind_of(tensor: Tensor) -> Kind:
    """Type and shape of a tensor."""
    return Kind(name_of(tensor.dtype), tuple(tensor.shape))


def is_sharded(module: nn.Module) -> bool:
    """Whether a rank holds only its part of some weight, so that all ranks must gather together."""
    return any(hasattr(value, "full_tensor") for value in named_weights(module).values())


def cut(manifest: Manifest, bucket_bytes: int) -> list[list[str]]:
    """Names for each bucket, in the model's order; a tensor larger than a bucket is alone in one of its own."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, kind in manifest.items():
        if parts[-1] and size + kind.num_bytes > bucket_bytes:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += kind.num_bytes
    return parts


def gathered(weights: Mapping[str, Tensor], names: Sequence[str], manifest: Manifest) -> dict[str, Tensor]:
    """These weights whole and in the manifest's type; all ranks of a sharded model call with the same names."""
    # What is cast is a rank's own part, before it is gathered.
    cast = {name: weights[name].detach().to(getattr(torch, manifest[name].dtype)) for name in names}
    return {name: _whole(tensor).contiguous() for name, tensor in cast.items()}


def buckets(module: nn.Module, dtype: str, bucket_bytes: int, verify: bool = False) -> Iterator[Bucket]:
    """The weights of a model in host memory, floats cast to `dtype`.

    On a CPU and without a cast they share the model's memory: load them before the next update. Every rank of a
    sharded model goes through all buckets, in step.
    """
    manifest, weights = manifest_of(module, dtype), named_weights(module)
    parts = cut(manifest, bucket_bytes)
    for position, names in enumerate(parts):
        begins = Update(manifest) if position == 0 else None
        yield packed(gathered(weights, names, manifest), verify, begins, position + 1 == len(parts))


def packed(tensors: Mapping[str, Tensor], verify: bool, begins: Update | None = None, ends: bool = True) -> Bucket:
    """A bucket that carries these tensors itself."""
    arrays = {name: array_of(tensor) for name, tensor in tensors.items()}
    kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
    checksums = {name: checksum_of(array) for name, array in arrays.items()} if verify else {}
    return Bucket(kinds, arrays, checksums, begins=begins, ends=ends)


def checksum_of(array: Array) -> str:
    """Digest of an array's bytes."""
    return hashlib.blake2b(array.reshape(-1).data, digest_size=16).hexdigest()


def tensor_of(array: Array, dtype: str) -> Tensor:
    """The tensor that an array stands for; it shares the array's memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # arrays from the object store are read-only, and only read here
        tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def array_of(tensor: Tensor) -> Array:
    """A tensor as an array in host memory; it shares the tensor's memory where it lies there in one piece."""
    tensor = tensor.cpu().contiguous()
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _whole(tensor: Tensor) -> Tensor:
    """A sharded tensor (`DTensor`) in one piece: every rank takes part."""
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = tensor if gather is None else gather()
    return whole


def name_of(dtype: torch.dtype) -> str:
    """A type by the name that documents use, such as `float32`."""
    return str(dtype).removeprefix("torch.")
