"""The training model of a worker: weights, optimizer and gradient, shared by all its nodes that use the model.

So `old_logprob` reads the very weights that `actor_update` changes. Gradients are *summed* over micro-batches and
ranks: a micro-batch's loss is its share of the whole mini-batch's, whose denominator every rank knows beforehand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flowrl.model import base_of
from flowrl.node import Context
from flowrl.nodes._backend.lora import adapters_off, training_model
from flowrl.nodes._backend.models import frozen_model, shared, use_threads

T = TypeVar("T")


class Update(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float
    """Of all ranks' gradients together, before clipping."""
    skipped: bool
    """The gradient was not finite, so nothing has changed."""


class Trainer:
    """A trainable model with its optimizer (AdamW); data-parallel where the worker's pool has several ranks."""

    def __init__(self, context: Context) -> None:
        spec = context.model_spec
        assert spec.trainable, "updating a frozen model is refused when the pipeline is checked"
        self.module: nn.Module = training_model(spec, context.device, context.seed)
        self.dtype = spec.dtype
        settings = spec.optimizer
        optimizer = torch.optim.AdamW(
            [parameter for parameter in self.module.parameters() if parameter.requires_grad],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )
        self._max_grad_norm = settings.max_grad_norm
        self._num_ranks = context.num_ranks
        self.num_skipped = 0
        """Steps in a row whose gradient was not finite."""
        self._accelerator = accelerator_of(context)
        # Data parallelism copies rank 0's weights to all ranks here, so that all start from the same.
        self.model, self.optimizer = self._accelerator.prepare(self.module, optimizer)

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, micro_batches: Sequence[T], share: Callable[[nn.Module, T], Tensor]) -> Update:
        """One optimizer step on the sum of the losses of all micro-batches and ranks.

        `share` gives a micro-batch's part of the loss, a scalar connected to the graph. Every rank calls with the same
        number of micro-batches, at least one. A gradient that is not finite changes neither weights nor optimizer.
        """
        self.optimizer.zero_grad()
        for position, micro_batch in enumerate(micro_batches):
            if position + 1 < len(micro_batches):
                with self._accelerator.no_sync(self.model):
                    self._backward(share(self.model, micro_batch))
            else:
                self._backward(share(self.model, micro_batch))
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        norm = get_total_norm(gradients)
        skipped = not bool(torch.isfinite(norm))
        if not skipped:
            clip_grads_with_norm_(self.module.parameters(), self._max_grad_norm, norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_skipped = self.num_skipped + 1 if skipped else 0
        return Update(norm.item(), skipped)

    def _backward(self, loss: Tensor) -> None:
        # Data parallelism averages over ranks; times their number, the gradient is the sum.
        self._accelerator.backward(loss * self._num_ranks)


def trainer_of(context: Context) -> Trainer:
    """The worker's trainer of the context's model, made by the first node that asks."""
    return shared(context, "trainer", lambda: Trainer(context))


def model_of(context: Context) -> Any:
    """The weights that log-probabilities are read from: the training weights themselves, or those of a frozen model."""
    holder = holder_of(context)
    return trainer_of(holder).module if holder.model_spec.trainable else frozen_model(holder)


def as_loaded(context: Context, model: nn.Module) -> AbstractContextManager[None]:
    """While `model_of` is read: a frozen model that is the base of one with adapters is so without them."""
    return nullcontext() if holder_of(context) is context else adapters_off(model)


def holder_of(context: Context) -> Context:
    """The context of the model that has the weights: of the one with adapters whose base the context's model is."""
    assert context.model is not None, f"node '{context.node}' uses no model"
    policy = base_of(context.model, context.models, context.trained)
    return context if policy is None else replace(context, model=policy)


def accelerator_of(context: Context) -> Accelerator:
    """The worker's one accelerator; with several ranks it joins their process group (`MASTER_ADDR`, `RANK`, ...)."""
    key = "accelerator"
    if key not in context.shared:
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        assert world_size == context.num_ranks, f"WORLD_SIZE is {world_size} in a pool of {context.num_ranks} ranks"
        # Buffers never change here, so nothing is gained by sending them with every forward pass.
        options = DistributedDataParallelKwargs(broadcast_buffers=False)
        context.shared[key] = Accelerator(cpu=context.device == "cpu", kwargs_handlers=[options])
        use_threads(context)  # accelerate has set a number of its own
    accelerator: Accelerator = context.shared[key]
    return accelerator
