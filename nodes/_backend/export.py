"""A trained model as files that other programs load: whole, its adapters merged, or an adapter alone as peft has it.

Both take the model as its trainer has it (`lora.training_model`, with the trained weights loaded), in one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowrl.model import ModelSpec
from flowrl.model_files import ModelError
from flowrl.nodes._backend.lora import ADAPTER, adapted_layers, merged, training_model
from flowrl.nodes._backend.models import folder_of, load_tokenizer
from flowrl.nodes._backend.trainer_state import load_weights
from flowrl.nodes._backend.value_head import save_value_model


def export_model(weights: Mapping[str, Any], spec: ModelSpec, folder: Path, adapter: bool = False) -> None:
    """Write the model of a checkpoint's weights; of one with an adapter, merged, or the adapter alone if asked for.

    Raises `ModelError`, also where the model has no adapter to write.
    """
    if adapter and spec.lora is None:
        raise ModelError(f"model '{spec.path}' was trained as a whole and has no adapter: leave out --adapter")
    if adapter and spec.head == "value":
        raise ModelError(f"model '{spec.path}' has a value head that trained beside its adapter: leave out --adapter")
    module = training_model(spec)
    try:
        load_weights(module, weights)
    except ValueError as error:
        raise ModelError(str(error)) from error
    (save_adapter if adapter else save_model)(module, spec, folder)


def save_model(module: Any, spec: ModelSpec, folder: Path) -> None:
    """Write weights, configuration and tokenizer as `from_pretrained` and vLLM read them, in the spec's type.

    Adapters are merged into `module` itself, which has none afterwards: a large model is not in memory twice. A
    value head becomes that of a classifier with one label.
    """
    fold_in(module)
    if spec.head == "value":
        save_value_model(module, spec, folder)
    else:
        module.save_pretrained(folder)
    load_tokenizer(spec).save_pretrained(folder)


def save_adapter(module: Any, spec: ModelSpec, folder: Path) -> None:
    """Write the adapter as `PeftModel.from_pretrained` and vLLM read it; it names the model that it belongs to."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    assert spec.lora is not None, "a model without an adapter is saved whole"
    folder.mkdir(parents=True, exist_ok=True)
    config = module.peft_config[ADAPTER]
    base = folder_of(spec)
    config.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    config.revision = spec.revision
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # peft has a set of them, written in any order
    config.save_pretrained(folder)
    found = get_peft_model_state_dict(module, adapter_name=ADAPTER, save_embedding_layers=False)
    tensors = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in found.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def fold_in(module: nn.Module) -> None:
    """Add to every weight what its adapter adds, as engines get it, and take the adapters out."""
    for name, layer in adapted_layers(module).items():
        base = layer.base_layer
        base.weight.copy_(merged(f"{name}.weight", base.weight, {name: layer}))
        parent, _, child = name.rpartition(".")
        setattr(module.get_submodule(parent), child, base)
