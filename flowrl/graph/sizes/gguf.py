"""The architecture of the model in a GGUF file, from its header; checked against the tensors that it lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowrl.gguf_header import GgufHeader, read_header
from flowrl.graph.sizes.architecture import Architecture, Unknown, from_config

_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "vocab_size": "vocab_size",
}
"""Of `config.json`, and of the model's section of a header."""
_TYPES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "phi3")
"""Architectures that are called the same in both, and dense."""


def architecture_of_gguf(file: Path) -> Architecture | Unknown:
    """The architecture, as long as all its parameters are accounted for; never raises."""
    try:
        header = read_header(file)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        return Unknown(f"the GGUF file '{file}' cannot be read: {said}")
    kind = header.metadata.get("general.architecture")
    if kind not in _TYPES or "llama.expert_count" in header.metadata:
        return Unknown(f"parameters of a GGUF file of type '{kind}' are not counted")
    found = from_config(_config(str(kind), header))
    if isinstance(found, Unknown):
        return Unknown(found.reason.replace("config.json", "GGUF header"))
    there = sum(num for name, num in header.tensors.items() if not name.startswith("rope_"))
    if there != found.num_parameters:
        return Unknown(f"its GGUF file holds {there:,} values, its header describes {found.num_parameters:,}")
    return found


def _config(kind: str, header: GgufHeader) -> dict[str, Any]:
    """What the header says, by the names of `config.json`."""
    config: dict[str, Any] = {key: header.of_model(name) for key, name in _KEYS.items()}
    config = {key: value for key, value in config.items() if value is not None}
    config.setdefault("vocab_size", header.metadata.get("tokenizer.ggml.tokens"))
    return {
        **config,
        "model_type": kind,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }
