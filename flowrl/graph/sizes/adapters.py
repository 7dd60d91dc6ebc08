"""How many parameters LoRA trains, from the shape of a model alone; a test compares each with what peft makes."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.graph.sizes.architecture import Architecture
from flowrl.model import ALL_LINEAR, LoraSpec, ModelSpec

ADAPTER_BYTES = 4
"""Bytes of an adapter's parameter: float32, whatever the type of the weights."""


def num_adapter_parameters(model: Architecture, lora: LoraSpec) -> int:
    """Of A (rank, inputs) and B (outputs, rank) in every layer that gets an adapter.

    Names that no layer has count nothing: the run refuses them.
    """
    layers = list(_layers(model))
    if lora.target_modules != ALL_LINEAR:
        wanted = tuple(f".{name}" for name in lora.target_modules)
        layers += [("." + name, model.vocabulary, model.hidden) for name in _around(model)]
        layers = [layer for layer in layers if layer[0].endswith(wanted)]
    return sum(lora.rank * (inputs + outputs) for _, inputs, outputs in layers)


def num_trained(model: Architecture, spec: ModelSpec) -> int:
    """Parameters that an update changes."""
    return model.num_parameters if spec.lora is None else num_adapter_parameters(model, spec.lora)


def _around(model: Architecture) -> tuple[str, ...]:
    """Layers of the vocabulary's size that may have an adapter: none where they are tied."""
    embedding = "transformer.wte" if model.model_type == "gpt2" else "model.embed_tokens"
    return () if model.tied else (embedding, "lm_head")


def _layers(model: Architecture) -> Iterator[tuple[str, int, int]]:
    """Full name, inputs and outputs of every linear layer between embedding and output projection.

    Experts and their routers are parameters without a layer in transformers, and get no adapter.
    """
    hidden, width = model.hidden, model.intermediate
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
    dense = {"gate_proj": (hidden, width), "up_proj": (hidden, width), "down_proj": (width, hidden)}
    if model.model_type == "phi3":
        attention = {"qkv_proj": (hidden, queries + 2 * keys)}
        dense = {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}
    attention["o_proj"] = (queries, hidden)
    if model.model_type == "gpt2":
        parts = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
        parts |= {"mlp.c_fc": (hidden, width), "mlp.c_proj": (width, hidden)}
    else:
        parts = {f"self_attn.{name}": shape for name, shape in attention.items()}
        parts |= {} if model.num_experts else {f"mlp.{name}": shape for name, shape in dense.items()}
    stem = "transformer.h" if model.model_type == "gpt2" else "model.layers"
    for layer in range(model.num_layers):
        for name, (inputs, outputs) in parts.items():
            yield f".{stem}.{layer}.{name}", inputs, outputs
