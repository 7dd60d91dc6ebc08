"""The weights of a cycle's start, for the log-probabilities of all its batches.

Where a cycle takes several updates before it syncs, the second batch is trained against the policy that the first one
was trained against. One copy of what trains lies in host memory: of the start while the model has the newest weights,
of the newest ones while it has those of the start. Exchanging them moves a copy each way, and is done once for all that
reads a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class CycleStart:
    """What trains of a model as it was when a cycle began; of a sharded model each rank has its own part."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._other: list[Tensor] = []
        """The weights, in host memory, that the model does not have at present."""
        self._cycle: int | None = None
        """The cycle whose start is kept."""
        self._shown = False
        """The model has the weights of the start."""

    def keep(self, cycle: int) -> None:
        """Copy the newest weights, which the model must have, if this is the first update of the cycle."""
        assert not self._shown, "these are the weights of a start"
        if cycle == self._cycle:
            return
        weights = self._weights()
        self._other = self._other or [torch.empty_like(weight, device="cpu") for weight in weights]
        for copy, weight in zip(self._other, weights, strict=True):
            copy.copy_(weight)
        self._cycle = cycle

    def show_at(self, cycle: int | None) -> None:
        """Give the model the weights of this cycle's start: the newest ones, if it has taken no update yet, or None."""
        self.show(cycle is not None and cycle == self._cycle)

    def show(self, start: bool) -> None:
        """Give the model the weights of the start that is kept, or the newest ones; those that it had are kept."""
        if start == self._shown:
            return
        for position, weight in enumerate(self._weights()):
            had = weight.to("cpu", copy=True)
            weight.copy_(self._other[position])
            self._other[position] = had
        self._shown = start

    def forget(self) -> None:
        """Keep nothing, as before the first cycle: other weights are about to be loaded."""
        self.show(False)
        self._other, self._cycle = [], None

    def _weights(self) -> list[Tensor]:
        trained = (parameter.detach() for parameter in self._module.parameters() if parameter.requires_grad)
        return [getattr(weight, "to_local", lambda weight=weight: weight)() for weight in trained]
