"""The optimizer of a trained model, and its learning rate over the steps of a run."""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from flowrl.functions import BadFunction, find_function
from flowrl.model import OptimizerSpec


class OptimizerError(ValueError):
    """An optimizer that cannot be made as the document says; the message names the setting."""


def make_optimizer(module: nn.Module, spec: OptimizerSpec) -> Optimizer:
    """The optimizer of all parameters that take gradients. Raises `OptimizerError`."""
    kind = _optimizer_class(spec.import_path)
    settings: dict[str, Any] = {"lr": spec.lr, "weight_decay": spec.weight_decay}
    if kind is AdamW:
        settings |= {"betas": spec.betas, "eps": spec.eps}
    settings |= spec.options
    taken = inspect.signature(kind).parameters
    if "weight_decay" not in taken and not spec.weight_decay:
        del settings["weight_decay"]
    unknown = sorted(settings.keys() - taken.keys())
    if unknown and not any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        raise OptimizerError(f"optimizer {spec.type} takes no '{unknown[0]}'; it takes {', '.join(list(taken)[1:])}")
    if any(
        parameter.default is parameter.empty for parameter in list(inspect.signature(kind.step).parameters.values())[1:]
    ):
        raise OptimizerError(f"optimizer {spec.type} computes the loss several times in a step: take another one")
    try:
        return kind(parameter_groups(module, spec), **settings)
    except (TypeError, ValueError, RuntimeError) as error:
        raise OptimizerError(f"optimizer {spec.type} cannot be made with {settings}: {error}") from error


def parameter_groups(module: nn.Module, spec: OptimizerSpec) -> list[dict[str, Any]]:
    """What decays, and, apart from it, what does not: biases and the weights of norms, which are no matrices."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2 or spec.decay_vectors]
    others = [parameter for parameter in parameters if parameter.ndim < 2 and not spec.decay_vectors]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_scheduler(optimizer: Optimizer, spec: OptimizerSpec, num_steps: int) -> LambdaLR:
    """The learning rate of a run of `num_steps` optimizer steps; it advances with every step that is taken."""
    return LambdaLR(optimizer, lambda step: rate_factor(spec, step, num_steps))


def rate_factor(spec: OptimizerSpec, step: int, num_steps: int) -> float:
    """Share of the learning rate in a step, counted from 0.

    It rises in `warmup_steps` equal parts, none of them 0, and then falls as it would to reach the end of its schedule
    in the step after the last one. Cosine: Loshchilov & Hutter, arXiv:1608.03983, without restarts.
    """
    if step < spec.warmup_steps:
        return (step + 1) / (spec.warmup_steps + 1)
    if spec.schedule == "constant":
        return 1.0
    passed = min((step - spec.warmup_steps) / max(num_steps - spec.warmup_steps, 1), 1.0)
    left = 1.0 - passed if spec.schedule == "linear" else (1.0 + math.cos(math.pi * passed)) / 2.0
    return spec.min_lr_rate + (1.0 - spec.min_lr_rate) * left


def _optimizer_class(name: str) -> type[Optimizer]:
    try:
        found = find_function(name)
    except BadFunction as error:
        raise OptimizerError(str(error)) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise OptimizerError(f"'{name}' is no optimizer: it must be a subclass of torch.optim.Optimizer")
    return found
