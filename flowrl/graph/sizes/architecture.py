"""The shape of a causal language model and its exact number of parameters, from `config.json` alone.

No weights, no torch, no transformers: a dry run must know what a 70B model needs on a laptop that has never seen it.
What cannot be counted exactly is `Unknown` with a reason, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Unknown:
    """The sizes of a model cannot be known before it is loaded."""

    reason: str


@dataclass(frozen=True)
class Architecture:
    """The shape of a causal language model."""

    model_type: str
    """As in `config.json`: `llama`, `qwen2`, ..."""
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Inner width of the feed-forward block of a dense layer."""
    vocabulary: int
    tied: bool
    """The output projection is the input embedding."""
    max_positions: int | None
    """Most tokens of prompt and response together."""
    num_experts: int
    """Of each sparse layer; 0 in a dense model."""
    num_active_experts: int
    """Experts that each token passes through."""
    num_parameters: int
    """All parameters, tied ones once."""
    num_active_parameters: int
    """Parameters without the experts that a token does not pass through."""
    num_layer_weights: int
    """Weights of the matrices in all layers that each token is multiplied with: no embedding, norm, bias or head."""
    value_head: bool = False
    """One number for each token is read off, by weights of the hidden size, and not one for each word."""

    @property
    def num_outputs(self) -> int:
        """Numbers that the head gives for each token."""
        return 1 if self.value_head else self.vocabulary

    def with_value_head(self) -> Architecture:
        """The shape of a critic that is made of this model."""
        more = self.hidden - (0 if self.tied else self.vocabulary * self.hidden)
        total, active = self.num_parameters + more, self.num_active_parameters + more
        return replace(self, value_head=True, tied=False, num_parameters=total, num_active_parameters=active)

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that the KV cache holds for each token: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


class _Unusable(ValueError):
    """A configuration does not say what is needed; the message says why."""


@dataclass(frozen=True)
class _Family:
    """How a model type differs from a Llama: RMS norms, rotary positions, gated feed-forward, grouped attention."""

    tied: bool = False
    """Whether embeddings are tied when the configuration does not say."""
    layer_norms: int = 2
    """Norms of the hidden size in each layer."""
    head_norms: bool = False
    """Queries and keys of each layer have a norm of the head's size."""
    qkv_bias: bool = False
    """Queries, keys and values always have a bias."""
    flags: tuple[str, ...] = ()
    """Which of `attention_bias` (all four projections) and `mlp_bias` the configuration may switch on."""
    head_dim: int | None = None
    """When the configuration does not say; None is hidden size / heads."""
    experts: tuple[str, ...] = ()
    """Names of the key with the number of experts; empty for dense layers."""
    may_be_dense: bool = False
    """The configuration may leave single layers without experts."""
    expert_width: str = "intermediate_size"
    """Key with the inner width of an expert."""
    active: str = "num_experts_per_tok"
    """Key with the number of experts that a token passes through."""


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(flags=("attention_bias", "mlp_bias")),
    "smollm3": _Family(tied=True, flags=("attention_bias", "mlp_bias")),
    "mistral": _Family(),
    "phi3": _Family(),
    "qwen2": _Family(qkv_bias=True),
    "qwen3": _Family(head_norms=True, flags=("attention_bias",), head_dim=128),
    "gemma": _Family(tied=True, flags=("attention_bias",), head_dim=256),
    "gemma2": _Family(tied=True, layer_norms=4, flags=("attention_bias",), head_dim=256),
    "mixtral": _Family(experts=("num_local_experts", "num_experts")),
    "qwen3_moe": _Family(
        head_norms=True,
        flags=("attention_bias",),
        experts=("num_experts", "num_local_experts"),
        expert_width="moe_intermediate_size",
        may_be_dense=True,
    ),
}
KNOWN_TYPES = (*_FAMILIES, "gpt2")
"""Model types whose parameters are counted exactly."""
_POSITIONS = ("n_positions", "max_position_embeddings")
_LARGEST = 10**9


def from_config(config: object) -> Architecture | Unknown:
    """The architecture that a parsed `config.json` describes; `Unknown` for whatever cannot be counted exactly."""
    if not isinstance(config, dict):
        return Unknown("its config.json holds no mapping")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KNOWN_TYPES:
        named = f"is of type '{kind}'" if isinstance(kind, str) else "names no model_type"
        return Unknown(f"its config.json {named}; parameters are counted for {', '.join(sorted(KNOWN_TYPES))}")
    if config.get("quantization_config") is not None:
        return Unknown("its config.json describes quantized weights, whose bytes are not counted")
    try:
        return _gpt2(config) if kind == "gpt2" else _like_llama(kind, config, _FAMILIES[kind])
    except _Unusable as error:
        return Unknown(f"its config.json {error}")


def _like_llama(kind: str, config: Mapping[str, Any], family: _Family) -> Architecture:
    """Layers of attention and gated feed-forward between an input embedding and an output projection, no positions."""
    hidden, layers = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    heads, vocabulary = _size(config, "num_attention_heads"), _size(config, "vocab_size")
    width = _size(config, "intermediate_size")
    kv_heads = heads if _left_to_default(kind, config) else _size(config, "num_key_value_heads")
    head_dim = _head_dim(config, family, hidden, heads)
    if heads % kv_heads:
        raise _Unusable(f"has {heads} attention heads for {kv_heads} key-value heads, which do not divide them")
    bias = {flag: _flag(config, flag, False) and flag in family.flags for flag in ("attention_bias", "mlp_bias")}
    queries, keys = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys
    vectors = family.layer_norms * hidden + 2 * head_dim * family.head_norms
    vectors += (queries + 2 * keys) * (family.qkv_bias or bias["attention_bias"]) + hidden * bias["attention_bias"]
    dense = 3 * hidden * width
    dense_vectors = (2 * width + hidden) * bias["mlp_bias"]
    experts, active, sparse, expert = _experts(config, family, layers, hidden)
    router = hidden * experts
    every_layer = layers * (attention + vectors) + (layers - sparse) * (dense + dense_vectors) + sparse * router
    tied = _flag(config, "tie_word_embeddings", family.tied)
    around = vocabulary * hidden * (1 if tied else 2) + hidden  # embedding, projection, last norm
    return Architecture(
        kind, layers, hidden, heads, kv_heads, head_dim, width, vocabulary, tied,
        max_positions=_size(config, "max_position_embeddings") if "max_position_embeddings" in config else None,
        num_experts=experts,
        num_active_experts=active,
        num_parameters=around + every_layer + sparse * experts * expert,
        num_active_parameters=around + every_layer + sparse * active * expert,
        num_layer_weights=layers * attention + (layers - sparse) * dense + sparse * (router + active * expert),
    )  # fmt: skip


def _left_to_default(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether there are as many key-value heads as heads: where the key is null, and in a Llama where it is missing."""
    return config.get("num_key_value_heads") is None and ("num_key_value_heads" in config or kind == "llama")


def _head_dim(config: Mapping[str, Any], family: _Family, hidden: int, heads: int) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    if family.head_dim is not None and "head_dim" not in config:
        return family.head_dim
    if hidden % heads:
        raise _Unusable(f"has a hidden size of {hidden}, which {heads} attention heads do not divide")
    return hidden // heads


def _experts(config: Mapping[str, Any], family: _Family, layers: int, hidden: int) -> tuple[int, int, int, int]:
    """Experts of a sparse layer, those that a token passes through, sparse layers, parameters of one expert."""
    if not family.experts:
        return 0, 0, 0, 0
    experts, active = _size(config, *family.experts), _size(config, family.active)
    if active > experts:
        raise _Unusable(f"sends each token through {active} of {experts} experts")
    step = _size(config, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise _Unusable(f"has mlp_only_layers {dense!r}, which is no list")
    sparse = layers
    if family.may_be_dense:
        named = {layer for layer in dense if isinstance(layer, int) and 0 <= layer < layers}
        sparse = layers // step - sum((layer + 1) % step == 0 for layer in named)
    return experts, active, sparse, 3 * hidden * _size(config, family.expert_width)


def _gpt2(config: Mapping[str, Any]) -> Architecture:
    """Learned positions, layer norms with bias, one matrix for queries, keys and values, a bias everywhere."""
    hidden, layers = _size(config, "n_embd", "hidden_size"), _size(config, "n_layer", "num_hidden_layers")
    heads, positions = _size(config, "n_head", "num_attention_heads"), _size(config, *_POSITIONS)
    vocabulary = _size(config, "vocab_size")
    width = _size(config, "n_inner") if config.get("n_inner") is not None else 4 * hidden
    if hidden % heads:
        raise _Unusable(f"has a hidden size of {hidden}, which {heads} attention heads do not divide")
    if _flag(config, "add_cross_attention", False):
        raise _Unusable("adds cross-attention, which is not counted")
    weights = layers * (4 * hidden * hidden + 2 * hidden * width)
    vectors = layers * (4 * hidden + 3 * hidden + hidden + width + hidden) + 2 * hidden
    tied = _flag(config, "tie_word_embeddings", True)
    total = weights + vectors + positions * hidden + vocabulary * hidden * (1 if tied else 2)
    return Architecture(
        "gpt2", layers, hidden, heads, heads, hidden // heads, width, vocabulary, tied, positions, 0, 0,
        total, total, weights,
    )  # fmt: skip


def _size(config: Mapping[str, Any], *names: str) -> int:
    """A whole number above 0, under the first of these names that is there."""
    key = next((name for name in names if name in config), names[0])
    if key not in config:
        raise _Unusable(f"lacks {key}")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
        raise _Unusable(f"has {key} {str(value)[:40]}, which is no size")
    return value


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise _Unusable(f"has {key} {str(value)[:40]}, which is neither true nor false")
    return value
