"""A trained model as a Hugging Face folder, which transformers and vLLM load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.model import ModelSpec
from flowrl.model_files import ModelError
from flowrl.nodes._backend.models import load_model, load_tokenizer
from flowrl.nodes._backend.trainer_state import load_weights


def export_model(weights: Mapping[str, Any], spec: ModelSpec, folder: str, adapter: bool = False) -> None:
    """Write config, weights, tokenizer and chat template; of an adapter, merged weights or, if asked for, it alone.

    Raises `ModelError`, also where the model has no adapter to write.
    """
    model: Any = load_model(spec)
    is_adapted = hasattr(model, "merge_and_unload")
    if adapter and not is_adapted:
        raise ModelError(f"model '{spec.path}' was trained as a whole and has no adapter: leave out --adapter")
    try:
        load_weights(model, weights)
    except ValueError as error:
        raise ModelError(str(error)) from error
    if is_adapted and not adapter:
        model = model.merge_and_unload()
    model.save_pretrained(folder)
    load_tokenizer(spec).save_pretrained(folder)
