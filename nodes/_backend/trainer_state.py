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

OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)
"""What is frozen, such as the base of an adapter, is loaded from the model's own files."""


def training_state(module: nn.Module, optimizer: Any, scheduler: Any = None) -> dict[str, Any]:
    """Weights, what the optimizer has gathered, and the scheduler's place.

    Of an optimizer that was never stepped the tensors are there too, so that they can be filled; it stays as it is.
    """
    inner = _inner(optimizer)
    stepped = bool(inner.state)
    gathered = {"kind": _kind(inner), "stepped": stepped, "state": _gathered(module, inner)["state"]}
    if not stepped:
        inner.state.clear()
    weights = dict(get_model_state_dict(module, options=OPTIONS))
    found = {"weights": weights, "optimizer": gathered}
    return found | ({"scheduler": scheduler.state_dict()} if scheduler is not None else {})


def load_training_state(state: Mapping[str, Any], module: nn.Module, optimizer: Any, scheduler: Any = None) -> None:
    """Go on from what `training_state` returned. Raises `ValueError` for weights of another model.

    An optimizer of another kind starts anew.
    """
    load_weights(module, state["weights"])
    inner, saved = _inner(optimizer), state["optimizer"]
    inner.state.clear()
    if saved["stepped"] and saved["kind"] == _kind(inner):
        own = _gathered(module, inner)
        gathered = {**own["state"], **saved["state"]}  # a parameter that no loss depends on has none
        set_optimizer_state_dict(module, inner, {**own, "state": gathered}, options=OPTIONS)
    if scheduler is not None and "scheduler" in state:
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
    inner = getattr(scheduler, "scheduler", scheduler)
    base = list(inner.base_lrs)
    scheduler.load_state_dict({**state, "base_lrs": base})
    factors = [factor(inner.last_epoch) for factor in getattr(inner, "lr_lambdas", [])]
    rates = [rate * factor for rate, factor in zip(base, factors, strict=True)] if factors else state["_last_lr"]
    for group, rate in zip(inner.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _gathered(module: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's state by name of parameter; one that was never stepped is given a state of zeros."""
    return dict(get_optimizer_state_dict(module, optimizer, options=OPTIONS))


def _inner(optimizer: Any) -> Any:
    """The optimizer itself, where accelerate has wrapped it."""
    return getattr(optimizer, "optimizer", optimizer)


def _kind(optimizer: Any) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
