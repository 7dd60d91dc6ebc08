"""Weights that arrive at a model in this process, and what is compared on the way."""

from __future__ import annotations

import torch
from torch import nn

from flowrl.nodes._backend.weights import (
    Bucket,
    Manifest,
    WeightsError,
    array_of,
    checksum_of,
    kind_of,
    manifest_of,
    named_weights,
    tensor_of,
)


class Loading:
    """An update of a model in this process, bucket by bucket."""

    def __init__(self, module: nn.Module, manifest: Manifest) -> None:
        """Raises `WeightsError`, nothing loaded, if a name, type or shape does not fit."""
        require_fit(manifest, manifest_of(module))
        self._targets, self._left = named_weights(module), set(manifest)
        self._checksums: dict[str, str] = {}

    @torch.no_grad()
    def load(self, bucket: Bucket) -> None:
        """Copy a bucket's tensors into the model."""
        for name, array in bucket.arrays.items():
            target = self._targets[name]
            require_fit({name: bucket.kinds[name]}, {name: kind_of(target)})
            target.copy_(tensor_of(array, bucket.kinds[name].dtype))
            self._left.discard(name)
        self._checksums |= bucket.checksums

    def finish(self) -> None:
        """Raises `WeightsError` if a weight has not come, or if what the model holds now is not what was sent."""
        if self._left:
            raise WeightsError(f"the weight '{min(self._left)}' was announced, but has not come")
        for name, checksum in self._checksums.items():
            require_same(name, checksum, checksum_of(array_of(self._targets[name].detach())))


def require_fit(sent: Manifest, here: Manifest) -> None:
    """Raises `WeightsError` unless both sides name the same weights, of the same types and shapes."""
    for name in [*here, *sent]:
        if name not in sent:
            raise WeightsError(f"the engine's weight '{name}' was not sent")
        if name not in here:
            raise WeightsError(f"the weight '{name}' was sent, but the engine's model has none of that name")
        if sent[name] != here[name]:
            raise WeightsError(f"the weight '{name}' is {here[name]} in the engine, but {sent[name]} was sent")


def require_same(name: str, sent: str, here: str, what: str = "the engine's weight") -> None:
    """Raises `WeightsError` where two checksums differ."""
    if sent != here:
        raise WeightsError(f"{what} '{name}' differs from the training weight after the sync: {here}, not {sent}")
