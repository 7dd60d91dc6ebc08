"""Which layers LoRA adapts, and how many parameters it trains, from the shape of a model alone.

Tests compare both with what peft makes.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import nearest
from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.model import ALL_LINEAR, LoraSpec, ModelSpec

ADAPTER_BYTES = 4
"""Bytes of an adapter's parameter: float32, whatever the type of the weights."""


def num_adapter_parameters(model: Architecture, lora: LoraSpec) -> int:
    """Of A (rank, inputs) and B (outputs, rank) in every layer that gets an adapter.

    Names that no layer has count nothing: they are refused.
    """
    return sum(lora.rank * (inputs + outputs) for _, inputs, outputs in _adapted(model, lora))


def other_adapters(model: Architecture | Unknown, was: LoraSpec | None, now: LoraSpec | None) -> str:
    """How the adapters that a model had are of another shape than those that it now has; empty where they are not."""
    if was is None or now is None:
        shown = ["all its weights trained" if one is None else "adapters trained" for one in (was, now)]
        return "" if was is now else f"had {shown[0]} and now has {shown[1]}"
    if was.rank != now.rank:
        return f"had lora.rank {was.rank} and now has {now.rank}"
    if isinstance(model, Unknown):
        return ""
    differ = {layer[0] for layer in {*_adapted(model, was)} ^ {*_adapted(model, now)}}
    return f"had adapters on other layers, as '{min(differ)[1:]}' shows" if differ else ""


def fault_of_target(model: Architecture, target: str) -> tuple[str, str] | None:
    """What is wrong with a name under `target_modules`, and what to write; None where nothing is, or nobody knows.

    Which layers of a mixture are dense is not in its shape.
    """
    names = [name for name, *_ in _able(model)]
    if model.num_experts or any(name.endswith(f".{target}") for name in names):
        return None
    if any(name.endswith(f".{target}") for name, *_ in _ends(model)):
        return f"'{target}' has its weights in common with another layer (tied embeddings)", "leave it out"
    return f"no layer called '{target}' can have an adapter", nearest(target, {n.rpartition(".")[2] for n in names})


def num_trained(model: Architecture, spec: ModelSpec) -> int:
    """Parameters that an update changes; a value head trains beside its adapters."""
    if spec.lora is None:
        return model.num_parameters
    return num_adapter_parameters(model, spec.lora) + model.hidden * model.value_head


def _adapted(model: Architecture, lora: LoraSpec) -> Iterator[tuple[str, int, int]]:
    """Every layer that gets an adapter, as `_layers` gives them."""
    if lora.target_modules == ALL_LINEAR:
        return _layers(model)
    wanted = tuple(f".{name}" for name in lora.target_modules)
    return (layer for layer in _able(model) if layer[0].endswith(wanted))


def _able(model: Architecture) -> Iterator[tuple[str, int, int]]:
    """Every layer that may have an adapter, as `_layers` gives them."""
    yield from _layers(model)
    if not model.tied:
        yield from _ends(model)
    if model.model_type == "gpt2" and model.max_positions is not None:
        yield ".transformer.wpe", model.max_positions, model.hidden


def _ends(model: Architecture) -> Iterator[tuple[str, int, int]]:
    """The layers of the vocabulary's size, which may have an adapter unless they are tied."""
    embedding = "transformer.wte" if model.model_type == "gpt2" else "model.embed_tokens"
    for name in [embedding, *["lm_head"] * (not model.value_head)]:
        yield f".{name}", model.vocabulary, model.hidden


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
