"""Checks of how models are trained: the optimizer and what it is told, and their adapters (FR005, FR007, FR078)."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem, nearest
from flowrl.graph.checks.sizes import cut_evenly
from flowrl.graph.sizes.adapters import fault_of_target
from flowrl.graph.sizes.architecture import Architecture
from flowrl.graph.sizes.batches import steps_of_run
from flowrl.graph.sizes.model_config import architectures
from flowrl.graph.subject import Subject
from flowrl.graph.words import count
from flowrl.model import ALL_LINEAR, OptimizerSpec
from flowrl.signatures import Signature, UnknownClass, signature_of
from flowrl.spec.scalars import number

_ROOT = "Optimizer"


def optimizer(subject: Subject) -> Iterator[Problem]:
    """FR007: an optimizer that is not there, is none, or takes no weight decay; FR005: an option it does not take."""
    for name, model in subject.document.models.items():
        spec, where = model.optimizer, ("models", name, "optimizer")
        shown = f"models.{name}: optimizer '{spec.type}'"
        if spec.type == "adamw" and not spec.options:
            continue
        try:
            found = signature_of(spec.import_path)
        except UnknownClass as error:
            yield Problem("FR007", subject.place(*where, "type"), f"{shown}: {error}", error.fix)
            continue
        if found is None:
            continue  # only making it will tell
        if fault := _no_optimizer(found):
            yield Problem("FR007", subject.place(*where, "type"), f"{shown} {fault}", "type: adamw")
            continue
        if found.takes_any:
            continue
        taken = found.names[1:]
        if spec.weight_decay and "weight_decay" not in taken:
            yield Problem("FR007", subject.place(*where, "weight_decay"),
                          f"{shown} takes no weight decay, but {number(spec.weight_decay)} is asked for",
                          "weight_decay: 0.0")  # fmt: skip
        for option in spec.options.keys() - set(taken):
            yield Problem("FR005", subject.place(*where, "options", option, key=True),
                          f"{shown} takes no '{option}'", nearest(option, taken))  # fmt: skip


def optimizer_without_effect(subject: Subject) -> Iterator[Problem]:
    """FR078: warnings for an optimizer of a model that does not train, and for a warm-up that the run does not end."""
    for name, model in subject.document.models.items():
        where, updates = ("models", name, "optimizer"), subject.of_role(name, "updates")
        idle = not model.trainable and not updates and not subject.reading.is_broken(("models", name, "trainable"))
        if idle and model.optimizer != OptimizerSpec():
            yield Problem("FR078", subject.place(*where, key=True),
                          f"models.{name}.optimizer has no effect: the model does not train",
                          f"models.{name}.optimizer: null", severity="warning")  # fmt: skip
        for node in updates if model.trainable else ():
            steps, warmup = steps_of_run(node, subject.document), model.optimizer.warmup_steps
            if 0 < steps <= warmup and cut_evenly(subject, node):
                yield Problem("FR078", subject.place(*where, "warmup_steps"),
                              f"models.{name}: the run ends before the learning rate has risen to lr: warmup_steps is "
                              f"{warmup:,}, and nodes.{node.name} takes {count(steps, 'optimizer step')} in all",
                              f"warmup_steps: {steps // 10}", severity="warning")  # fmt: skip


def adapted_layers(subject: Subject) -> Iterator[Problem]:
    """FR007: `lora.target_modules` has a name that no layer of the model has; of a model of unknown shape a run tells.

    Files that come with a model may name its layers otherwise.
    """
    named = [
        (name, spec)
        for name, spec in subject.document.models.items()
        if spec.lora is not None and spec.lora.target_modules != ALL_LINEAR and not spec.trust_remote_code
    ]
    models = architectures(named)
    for name, spec in named:
        assert spec.lora is not None, "only these are named"
        path = ("models", name, "lora", "target_modules")
        for position, target in enumerate(spec.lora.target_modules):
            model = models[name]
            if isinstance(model, Architecture) and (fault := fault_of_target(model, target)):
                place = subject.reading.place((*path, position))
                yield Problem("FR007", place, f"{'.'.join(path)}: in '{spec.path}' {fault[0]}", fault[1])


def _no_optimizer(found: Signature) -> str:
    """Why a class cannot take the steps of a training, if it cannot."""
    if found.root not in (None, _ROOT):
        return f"is no optimizer of torch, but derived from {found.root}"
    if found.required.get("step"):
        return "computes the loss several times in a step, which is not possible here"
    return ""
