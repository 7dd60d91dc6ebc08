"""Architectures from configurations alone: exact counts, published models, and whatever a file may hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from flowrl.graph.sizes.architecture import KNOWN_TYPES, Architecture, Unknown, from_config
from flowrl.graph.sizes.model_config import FACTS, read_architecture

SMALL = {"vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GOOD = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
ENTRIES = json.loads(FACTS.read_text())
IDS = [(name, entry["parameters"]) for entry in ENTRIES for name in entry["ids"]]


def count(config: dict[str, Any]) -> tuple[int, int]:
    """All parameters that transformers makes of a configuration, and the numbers in its layers' matrices."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    total = sum(parameter.numel() for parameter in model.parameters())  # tied ones come once
    body = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and not any(word in name for word in ("embed", "wte", "wpe", "lm_head"))
    ]
    return total, sum(parameter.numel() for _, parameter in body)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(KNOWN_TYPES))
    layers, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    heads, head_dim = kv_heads * draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([4, 6]))
    config: dict[str, Any] = {"model_type": kind, **SMALL}
    if draw(st.booleans()):
        config["tie_word_embeddings"] = draw(st.booleans())
    if kind == "gpt2":
        inner = draw(st.sampled_from([None, 20]))
        del config["max_position_embeddings"]  # another name of n_positions
        return config | {"n_layer": layers, "n_head": heads, "n_embd": heads * 8, "n_inner": inner, "n_positions": 32}
    config |= {
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "hidden_size": heads * 8, "intermediate_size": draw(st.sampled_from([20, 36])),
    }  # fmt: skip
    if kind != "phi3" and draw(st.booleans()):
        config["head_dim"] = head_dim
    for flag in ("attention_bias", "mlp_bias"):
        if kind not in ("phi3", "mixtral", "mistral", "qwen2") and draw(st.booleans()):
            config[flag] = draw(st.booleans())
    if kind == "mixtral":
        config |= {"num_local_experts": draw(st.integers(2, 4)), "num_experts_per_tok": 2}
    if kind == "qwen3_moe":
        config |= {
            "num_experts": draw(st.integers(2, 4)), "num_experts_per_tok": 2, "moe_intermediate_size": 12,
            "decoder_sparse_step": draw(st.integers(1, 2)), "mlp_only_layers": draw(st.sampled_from([[], [0], [1, 9]])),
        }  # fmt: skip
    return config


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(configs())
def test_parameters_are_those_of_transformers(config: dict[str, Any]) -> None:
    found = from_config(config)
    assert isinstance(found, Architecture)
    total, matrices = count(config)
    assert found.num_parameters == total
    assert from_config(json.loads(AutoConfig.for_model(**config).to_json_string())) == found, "as it is saved"
    if found.num_experts:
        assert found.num_active_parameters <= total
    else:
        assert found.num_active_parameters == total
        assert found.num_layer_weights == matrices


@pytest.mark.parametrize("active", [1, 2, 3])
def test_of_the_experts_those_that_a_token_passes_through_are_active(active: int) -> None:
    config = {
        **GOOD, **SMALL, "model_type": "qwen3_moe", "num_experts": 3, "num_experts_per_tok": active,
        "moe_intermediate_size": 10,
    }  # fmt: skip
    found = from_config(config)
    assert isinstance(found, Architecture)
    total, matrices = count(config)
    idle = 2 * (3 - active) * 3 * 32 * 10  # layers x idle experts x three matrices
    assert (found.num_active_parameters, found.num_layer_weights) == (total - idle, matrices - idle)


@pytest.mark.parametrize(("name", "published"), IDS, ids=[name for name, _ in IDS])
def test_well_known_models_have_their_published_size(name: str, published: int) -> None:
    found = read_architecture(name)
    assert isinstance(found, Architecture)
    assert found.num_parameters == published


@pytest.mark.parametrize("entry", ENTRIES, ids=[next(iter(entry["ids"])) for entry in ENTRIES])
def test_well_known_models_are_what_transformers_would_make(entry: dict[str, Any]) -> None:
    with torch.device("meta"):
        config = {**entry["config"], "pad_token_id": None}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert sum(parameter.numel() for parameter in model.parameters()) == entry["parameters"]


def test_the_active_parameters_of_a_mixture_of_experts() -> None:
    found = read_architecture("Qwen/Qwen3-30B-A3B")
    assert isinstance(found, Architecture)
    assert found.num_active_parameters == 3_353_032_704


def test_the_shipped_model() -> None:
    found = read_architecture("arith-tiny")
    assert isinstance(found, Architecture)
    assert (found.num_parameters, found.max_positions, found.kv_values_per_token) == (661_632, 64, 2 * 4 * 2 * 64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "mamba"}, "is of type 'mamba'"),
        ({"model_type": None}, "names no model_type"),
        ({"hidden_size": None}, "has hidden_size None"),
        ({"hidden_size": True}, "has hidden_size True"),
        ({"num_hidden_layers": "2"}, "has num_hidden_layers 2"),
        ({"vocab_size": 0}, "has vocab_size 0"),
        ({"vocab_size": 10**30}, "which is no size"),
        ({"num_key_value_heads": 3}, "4 attention heads for 3 key-value heads"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "which 5 attention heads do not divide"),
        ({"tie_word_embeddings": "yes"}, "has tie_word_embeddings yes"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_what_cannot_be_counted_is_unknown_for_a_reason(change: dict[str, Any], reason: str) -> None:
    found = from_config({**GOOD, **change})
    assert isinstance(found, Unknown)
    assert reason in found.reason


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*GOOD, "head_dim", "attention_bias", "mlp_bias", "num_experts", "num_local_experts", "mlp_only_layers",
               "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "n_embd", "n_layer", "n_head",
               "n_positions", "n_inner", "max_position_embeddings"})  # fmt: skip


@given(st.sampled_from(KNOWN_TYPES), st.dictionaries(st.sampled_from(KEYS), JUNK | st.integers(1, 64)), JUNK)
def test_no_configuration_raises(kind: str, change: dict[str, Any], other: Any) -> None:
    assert isinstance(from_config({**GOOD, "model_type": kind, **change}), Architecture | Unknown)
    assert isinstance(from_config(other), Architecture | Unknown)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, '{"model_type": "llama"}', "NaN", "\x00", '"llama"'])
def test_no_file_raises(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert isinstance(read_architecture(str(tmp_path)), Unknown)


def test_bytes_that_are_no_text_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert isinstance(read_architecture(str(tmp_path)), Unknown)


@pytest.mark.parametrize(
    "path", ["nobody/nothing", "/no/such", "~nobody-at-all/x", "a\0b", "x" * 5000, "m.gguf", "../x"]
)
def test_a_model_that_is_not_here_is_unknown(path: str) -> None:
    assert isinstance(read_architecture(path), Unknown)


def test_a_folder_needs_a_configuration(tmp_path: Path) -> None:
    found = read_architecture(str(tmp_path))
    assert isinstance(found, Unknown)
    assert str(tmp_path) in found.reason
    (tmp_path / "config.json").write_text(json.dumps(GOOD))
    assert isinstance(read_architecture(str(tmp_path)), Architecture)


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"])
def test_the_cache_of_the_hub_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    hub = tmp_path / "hub" if variable == "HF_HOME" else tmp_path
    for revision, layers in (("old", 1), ("main_one", 3), ("newest", 2)):
        folder = hub / "models--me--mine" / "snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**GOOD, "num_hidden_layers": layers}))
    refs = hub / "models--me--mine" / "refs"
    refs.mkdir()
    (refs / "main").write_text("main_one")
    found = read_architecture("me/mine")
    assert isinstance(found, Architecture)
    assert found.num_layers == 3
    assert isinstance(read_architecture("me/other"), Unknown)
