"""The training model of a worker: weights, optimizer and gradient, shared by all its nodes that use the model.

So `old_logprob` reads the very weights that `actor_update` changes. Gradients are *summed* over micro-batches and
ranks: a micro-batch's loss is its share of the whole mini-batch's, whose denominator every rank knows beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flowrl.model import base_of
from flowrl.model_files import ModelError
from flowrl.node import Context
from flowrl.nodes._backend.cycle import CycleStart
from flowrl.nodes._backend.lora import adapters_off, training_model
from flowrl.nodes._backend.models import frozen_model, shared, use_threads
from flowrl.nodes._backend.optimizer import make_optimizer, make_scheduler
from flowrl.nodes._backend.parallel import (
    compute_in,
    copied,
    gradients_kept,
    move,
    shard,
    sum_over_ranks,
    will_be_sharded,
)

T = TypeVar("T")


class Update(NamedTuple):
    """What one optimizer step did."""

    grad_norm: float
    """Of all ranks' gradients together, before clipping."""
    clipped: bool
    """The norm was above the limit, so the gradient was scaled down to it."""
    skipped: bool
    """The loss or its gradient was not finite, so nothing has changed."""
    learning_rate: float
    """Of this step."""


class Trainer:
    """A trainable model with its optimizer and learning-rate schedule, on all ranks of the worker's pool."""

    def __init__(self, context: Context) -> None:
        spec = context.model_spec
        assert spec.trainable, "updating a frozen model is refused when the pipeline is checked"
        use_threads(context)
        self.module = make_model(context)
        """The bare model; of a sharded one each rank holds its share."""
        self.model = wrapped(self.module, context)
        """The model to call for gradients."""
        self.dtype = spec.dtype
        self.optimizer = make_optimizer(self.module, spec.optimizer)
        self.scheduler = make_scheduler(self.optimizer, spec.optimizer, context.num_optimizer_steps)
        self.num_skipped = 0
        """Steps in a row whose loss or gradient was not finite."""
        self.cycle_start = CycleStart(self.module)
        """What readers of a cycle's later batches see."""
        self._max_grad_norm = spec.optimizer.max_grad_norm
        self._num_ranks = context.num_ranks

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def step(self, micro_batches: Sequence[T], share: Callable[[nn.Module, T], Tensor]) -> Update:
        """One optimizer step on the sum of the losses of all micro-batches and ranks.

        `share` gives a micro-batch's part of the loss, a scalar connected to the graph. Every rank calls with the same
        number of micro-batches, at least one. A loss or a gradient that is not finite changes nothing, on any rank: not
        the weights, the optimizer, or the learning rate of the next step.
        """
        self.optimizer.zero_grad()
        shares = []
        for position, micro_batch in enumerate(micro_batches):
            last = position + 1 == len(micro_batches)
            with nullcontext() if last else gradients_kept(self.model):
                loss = share(self.model, micro_batch)
                # Ranks are averaged; times their number, the gradient is the sum.
                torch.autograd.backward(loss * self._num_ranks)
                shares.append(loss.detach())
        learning_rate = self.learning_rate
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        norm = get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # the same on all ranks, which decide alike
        # A clamp has a gradient of 0 whatever comes in, so that a NaN may be in the loss alone.
        skipped = not bool(torch.isfinite(norm) & torch.isfinite(sum_over_ranks(torch.stack(shares).sum())))
        if not skipped:
            clip_grads_with_norm_(self.module.parameters(), self._max_grad_norm, norm)
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.num_skipped = self.num_skipped + 1 if skipped else 0
        clipped = not skipped and norm.item() > self._max_grad_norm
        return Update(norm.item(), clipped, skipped, learning_rate)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it; ranks that share the model each give their part."""
        from flowrl.nodes._backend.trainer_state import training_state

        self.cycle_start.show(False)
        return training_state(self.module, self.optimizer, self.scheduler) | {"num_skipped": self.num_skipped}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned. Raises `ValueError` for that of another model."""
        from flowrl.nodes._backend.trainer_state import load_training_state

        self.cycle_start.forget()
        load_training_state(state, self.module, self.optimizer, self.scheduler)
        self.num_skipped = int(state["num_skipped"])


def make_model(context: Context) -> nn.Module:
    """The model that is to be trained, as one rank would hold it."""
    spec = context.model_spec
    # A model that will be sharded need not fit on the device: its layers go there one by one.
    model = training_model(spec, "cpu" if will_be_sharded(spec, context) else context.device, context.seed)
    return checkpoint_layers(model) if spec.gradient_checkpointing else model


def checkpoint_layers(model: Any) -> nn.Module:
    """Let each layer keep its inputs only, and compute once more in the backward pass. Raises `ModelError`."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise ModelError(f"a model of type '{model.config.model_type}' has no gradient_checkpointing: switch it off")
    model.gradient_checkpointing_enable()
    for layer in layers:
        layer.training = True  # what makes it compute again; what lies inside it stays without dropout
    layered: nn.Module = model
    return layered


def wrapped(module: nn.Module, context: Context) -> nn.Module:
    """The model to call, on all ranks of the pool and in the type that it is to compute in."""
    compute_in(module, context.model_spec, context)
    if context.num_ranks == 1:
        return module
    if not will_be_sharded(context.model_spec, context):
        return copied(module, context)
    shard(module, context.model_spec, context)
    return module


def trainer_of(context: Context) -> Trainer:
    """The worker's trainer of the context's model, made by the first node that asks."""
    return shared(context, "trainer", lambda: Trainer(context))


def model_of(context: Context) -> Any:
    """The weights that log-probabilities are read from: the training weights themselves, or those of a frozen model."""
    holder = holder_of(context)
    return trainer_of(holder).module if holder.model_spec.trainable else frozen_model(holder)


@contextmanager
def as_read(context: Context, model: nn.Module) -> Iterator[None]:
    """While `model_of` is read: one that trains has the weights of the start of its cycle, whatever was updated since.

    A frozen model that is the base of one with adapters is so without them.
    """
    if holder_of(context) is not context:
        with adapters_off(model):
            yield
        return
    if context.model_spec.trainable:
        trainer_of(context).cycle_start.show_at(context.cycle)
    yield


def holder_of(context: Context) -> Context:
    """The context of the model that has the weights: of the one with adapters whose base the context's model is."""
    assert context.model is not None, f"node '{context.node}' uses no model"
    policy = base_of(context.model, context.models, context.trained)
    return context if policy is None else replace(context, model=policy)


def place(context: Context, awake: bool) -> None:
    """Keep the context's model on its device, or in host memory while others need that, if the model is to be moved."""
    context = holder_of(context)
    spec, on_device = context.model_spec, shared(context, "on device", lambda: [True])
    if not spec.offload or context.device == "cpu" or on_device == [awake]:
        return
    optimizer = trainer_of(context).optimizer if spec.trainable else None
    move(model_of(context), optimizer, context.device if awake else "cpu")
    torch.cuda.empty_cache()
    on_device[:] = [awake]
