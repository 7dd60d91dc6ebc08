"""LoRA (arXiv:2106.09685) by peft: frozen weights W, beside which only the adapters A and B train.

A layer computes W x + scaling * B (A x). Adapters are float32, of whatever type W is. To others the model is one of
plain weights: they get W + scaling * B A under W's name, computed beside the model, which stays as it is. With the
adapters off it is the model that was loaded.

peft's layers are known here by what they offer, for importing peft takes seconds, and most models have no adapter.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowrl.errors import nearest
from flowrl.model import ALL_LINEAR, LoraSpec, ModelSpec
from flowrl.model_files import ModelError
from flowrl.nodes._backend.value_head import load_headed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "default"
"""Name that peft gives a model's only adapter."""


class UpdateDropout(nn.Module):
    """Dropout where gradients are wanted: log-probabilities that are only read are those that engines sample from."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, values: Tensor) -> Tensor:
        """The values, a share of them 0 and the others scaled up, or as they are."""
        return nn.functional.dropout(values, self.share, training=torch.is_grad_enabled())


def training_model(spec: ModelSpec, device: str = "cpu", seed: int = 0) -> PreTrainedModel:
    """The model as its trainer has it: with adapters where the spec asks for them, whose values the seed gives."""
    model: Any = load_headed(spec)
    if spec.lora is not None:
        adapt(model, spec.lora, seed)
    if spec.head == "value":
        model.get_output_embeddings().requires_grad_()  # nobody has trained it, so it trains beside any adapters
    placed: PreTrainedModel = model.to(device)
    return placed


def adapt(model: nn.Module, spec: LoraSpec, seed: int) -> None:
    """Put an adapter beside every target layer and freeze all else; B starts at 0, so that nothing is added yet.

    Raises `ModelError` for names that no layer has, and for layers that cannot have an adapter.
    """
    from peft import LoraConfig, TaskType, inject_adapter_in_model

    targets = _targets(model, spec)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, r=spec.rank, lora_alpha=spec.alpha, use_rslora=spec.rslora,
        lora_dropout=spec.dropout, target_modules=targets,
    )  # fmt: skip
    torch.manual_seed(seed)  # on every rank the same; what dropout draws later follows from it too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it says that it has noticed which way round GPT-2's matrices are
        inject_adapter_in_model(config, model, ADAPTER)
    if strange := adapted_layers(model).keys() ^ set(targets):
        raise ModelError(
            f"peft has put adapters on other layers than were asked for, as '{min(strange)}' shows: the experts of a "
            "mixture cannot have one here. Name the layers of the attention in lora.target_modules"
        )
    for parameter in model.parameters():
        if parameter.requires_grad:  # peft makes adapters of their layer's type, in which small steps round away
            parameter.data = parameter.data.float()
    if spec.dropout:
        for layer in adapted_layers(model).values():
            layer.lora_dropout[ADAPTER] = UpdateDropout(spec.dropout)
    model.eval()


def adapted_layers(module: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "get_delta_weight")}


def plain_name(name: str, layers: Mapping[str, Any]) -> str | None:
    """The name that a weight has in the model without adapters; None of a weight of an adapter."""
    parts = name.split(".")
    for depth in range(len(parts)):
        if ".".join(parts[:depth]) in layers:
            return ".".join(parts[:depth] + parts[depth + 1 :]) if parts[depth] == "base_layer" else None
    return name


def merged(name: str, weight: Tensor, layers: Mapping[str, Any]) -> Tensor:
    """The weight with what its layer's adapter adds to it, if it has one; in float32, or the weight's own wider type.

    Of a sharded model all ranks call, each for its part.
    """
    layer = layers.get(name.removesuffix(".weight"))
    return (
        weight if layer is None or not name.endswith(".weight") else weight + layer.get_delta_weight(ADAPTER).detach()
    )


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """The model without its adapters: the one that was loaded."""
    layers = adapted_layers(module).values()
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _targets(model: Any, spec: LoraSpec) -> list[str]:
    """Full names of the layers that get an adapter. Raises `ModelError` for a name that is not that of such layers."""
    from transformers.pytorch_utils import Conv1D

    modules = {name: module for name, module in model.named_modules() if name}
    if spec.target_modules == ALL_LINEAR:
        output = model.get_output_embeddings()
        return [n for n, module in modules.items() if isinstance(module, (nn.Linear, Conv1D)) and module is not output]
    able = {name: module for name, module in modules.items() if isinstance(module, (nn.Linear, nn.Embedding, Conv1D))}
    chosen: dict[str, None] = {}
    for target in spec.target_modules:
        found = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not found or not able.keys() >= set(found):
            why = f"'{found[0]}' is a {type(modules[found[0]]).__name__}" if found else "no layer has that name"
            known = nearest(target, {name.rpartition(".")[2] for name in able})
            raise ModelError(f"lora.target_modules has '{target}', but {why}; {known}")
        _require_untied(target, {name: able[name].weight for name in found}, model)
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _require_untied(target: str, weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raises `ModelError` where a layer shares its weights with another: merged they would differ."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holder = name.rpartition(".")[0]
        if holder not in weights and any(parameter is weight for weight in weights.values()):
            raise ModelError(
                f"lora.target_modules has '{target}', whose weights are those of '{holder}' too (tied embeddings): "
                "with an adapter they would differ, so leave it out"
            )
