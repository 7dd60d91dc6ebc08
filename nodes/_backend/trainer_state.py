"""The training state of a model, in a form that any number of ranks, with copies or with shares of it, can load.

Weights and what the optimizer has gathered come from the checkpoint, by the names of the parameters. Learning rate,
decay and the like are the document's: somebody who resumes with another learning rate means it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What is frozen, such as the base of an adapter, is loaded from the model's own files."""


def training_state(module: nn.Module, optimizer: Optimizer, scheduler: LambdaLR) -> dict[str, Any]:
    """Weights, what the optimizer has gathered, and the scheduler's place.

    Of an optimizer that was never stepped the tensors are there too, so that they can be filled; it stays as it is.
    """
    stepped = bool(optimizer.state)
    gathered = {"kind": _kind(optimizer), "stepped": stepped, "state": _gathered(module, optimizer)["state"]}
    if not stepped:
        optimizer.state.clear()
    weights = dict(get_model_state_dict(module, options=OPTIONS))
    return {"weights": weights, "optimizer": gathered, "scheduler": scheduler.state_dict()}


def load_training_state(state: Mapping[str, Any], module: nn.Module, optimizer: Optimizer, scheduler: LambdaLR) -> None:
    """Go on from what `training_state` returned. Raises `ValueError` for weights of another model.

    An optimizer of another kind starts anew.
    """
    load_weights(module, state["weights"])
    saved = state["optimizer"]
    optimizer.state.clear()
    if saved["stepped"] and saved["kind"] == _kind(optimizer):
        own = _gathered(module, optimizer)
        gathered = {**own["state"], **saved["state"]}  # a parameter that no loss depends on has none
        set_optimizer_state_dict(module, optimizer, {**own, "state": gathered}, options=OPTIONS)
    _load_scheduler(scheduler, state["scheduler"])


def load_weights(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Give a model the weights of a checkpoint. Raises `ValueError` for those of another model."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    if lost := sorted(trained - weights.keys()):
        raise ValueError(f"the checkpoint is of another model: it lacks {len(lost)} weights, the first is '{lost[0]}'")
    try:
        strange = set_model_state_dict(module, dict(weights), options=OPTIONS).unexpected_keys
    except RuntimeError as error:
        raise ValueError(f"the checkpoint is of another model: {str(error).splitlines()[-1].strip()}") from error
    if strange:
        raise ValueError(f"the checkpoint is of another model: this one has no weight '{strange[0]}'")


def _load_scheduler(scheduler: Any, state: Mapping[str, Any]) -> None:
    """Its place in the schedule, with the learning rates of the document."""
    base, place = list(scheduler.base_lrs), int(state["last_epoch"])
    scheduler.load_state_dict({**state, "base_lrs": base})
    for group, rate, factor in zip(scheduler.optimizer.param_groups, base, scheduler.lr_lambdas, strict=True):
        group["lr"] = rate * factor(place)


def _gathered(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by name of parameter; one that was never stepped is given a state of zeros."""
    return dict(get_optimizer_state_dict(module, optimizer, options=OPTIONS))


def _kind(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
