"""What LoRA trains, holds and computes is what peft makes of the model, and what torch counts."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from flowrl.graph.show.report import as_plan
from flowrl.graph.sizes.adapters import fault_of_target, num_adapter_parameters, other_adapters
from flowrl.graph.sizes.architecture import Architecture, from_config
from flowrl.graph.sizes.batches import Passes
from flowrl.graph.sizes.flops import work_of_passes
from flowrl.graph.sizes.lengths import Lengths
from flowrl.graph.sizes.measure import measure
from flowrl.graph.sizes.memory import Share
from flowrl.model import LoraSpec
from flowrl.model_files import ModelError
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.lora import adapt
from flowrl.pipeline import load
from flowrl.rows import Jagged

DEFAULT = Path(__file__).parents[4] / "pipelines" / "grpo_sync.yaml"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {**LLAMA, "model_type": "qwen3", "head_dim": 16},
    "phi3": {**LLAMA, "model_type": "phi3"},
    "gemma": {**LLAMA, "model_type": "gemma", "head_dim": 16},
    "mixtral": {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**LLAMA, "model_type": "qwen3_moe", "head_dim": 16, **EXPERTS},
    "gpt2": {"model_type": "gpt2", "vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
             "bos_token_id": 1, "eos_token_id": 2},
}  # fmt: skip


def made(config: dict[str, Any]) -> tuple[Any, Architecture]:
    found = from_config(config)
    assert isinstance(found, Architecture)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)), found


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ["o_proj", "down_proj", "c_proj"],
        ["q_proj", "embed_tokens", "lm_head", "wpe"],
        ["layers.1.self_attn.k_proj"],
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapters_of_a_model_are_counted_as_peft_makes_them(kind: str, targets: Any) -> None:
    model, architecture = made(KINDS[kind])
    if targets != "all-linear":
        names = {f".{name}" for name, module in model.named_modules() if hasattr(module, "weight")}
        tied = {"embed_tokens", "lm_head"} if architecture.tied else set()
        targets = [one for one in targets if any(name.endswith(f".{one}") for name in names) and one not in tied]
    if not targets:
        pytest.skip("a model without such layers")
    lora = LoraSpec(rank=3, target_modules=targets)
    adapt(model, lora, 0)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert num_adapter_parameters(architecture, lora) == trained > 0


NAMES = (
    "q_proj", "qkv_proj", "gate_proj", "down_proj", "c_attn", "mlp.c_proj", "layers.1.self_attn.k_proj",
    "h.0.attn.c_attn", "model.layers.0.mlp.up_proj", "embed_tokens", "wte", "wpe", "lm_head", "self_attn", "mlp",
    "norm", "input_layernorm", "q_prj", "layers.7.self_attn.q_proj", "proj",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_is_refused_before_the_run_where_the_run_would_refuse_it(kind: str) -> None:
    for name in NAMES:
        model, architecture = made(KINDS[kind])
        try:
            adapt(model, LoraSpec(rank=1, target_modules=[name]), 0)
            fits = True
        except ModelError:
            fits = False
        found = fault_of_target(architecture, name)
        assert found is None if fits or architecture.num_experts else found is not None, (name, found)


@pytest.mark.parametrize(
    ("was", "now", "fault"),
    [
        ({"rank": 4}, {"rank": 4, "alpha": 3, "dropout": 0.1, "rslora": True}, ""),
        ({"rank": 4}, {"rank": 8}, "had lora.rank 4 and now has 8"),
        ({"target_modules": ["q_proj", "v_proj"]}, {"target_modules": ["v_proj", "self_attn.q_proj", "q_proj"]}, ""),
        ({"target_modules": ["q_proj"]}, {}, "as 'model.layers.0.mlp.down_proj' shows"),
        ({}, None, "had adapters trained and now has all its weights trained"),
        (None, {}, "had all its weights trained and now has adapters trained"),
        (None, None, ""),
    ],
)
def test_adapters_of_another_shape_are_known_before_they_are_loaded(was: Any, now: Any, fault: str) -> None:
    model = from_config(LLAMA)
    specs = [None if one is None else LoraSpec(**one) for one in (was, now)]
    found = other_adapters(model, *specs)
    assert fault in found if fault else not found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_update_of_adapters_is_about_two_forward_passes(kind: str) -> None:
    wide = {"hidden_size": 160, "intermediate_size": 320, "n_embd": 160, "num_hidden_layers": 8, "n_layer": 8}
    model, architecture = made({**KINDS[kind], **{key: wide[key] for key in wide if key in KINDS[kind]}})
    adapt(model, LoraSpec(rank=1), 0)
    rows = np.random.default_rng(0).integers(3, 50, (3, 9))
    prompts = Jagged.of(list(np.repeat(rows, 4, axis=0)), np.int64)
    responses = Jagged.of(list(np.random.default_rng(1).integers(3, 50, (12, 6))), np.int64)
    with FlopCounterMode(display=False) as counter:
        log_probs, _ = token_log_probs(model, prompts, responses, temperature=1.0)
        log_probs.sum().backward()
    cut = Passes("update", True, 1, 3, 3, 4, 1, 1, 8192, Lengths(9, 6))
    work = work_of_passes(cut, "m", architecture, Lengths(9, 6), adapters=True)
    assert isinstance(work.flops, int)
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.06)


def shares(*sets: str) -> dict[tuple[str, str], Share]:
    (memory,) = measure(load(DEFAULT, sets).plan()).memory
    return {(share.model, share.what): share for share in memory.shares if not share.node}


def test_gradients_and_moments_are_those_of_the_adapters_and_the_reference_costs_nothing() -> None:
    """Rank 8 on 4 layers of q, k, v, o of 128 x 128 and gate, up, down of 128 x 256: 8 x 4 x (4 x 256 + 3 x 384)."""
    num = 8 * 4 * (4 * 256 + 3 * 384)
    found = {key: share.num_bytes for key, share in shares("models.policy.lora={rank: 8}").items()}
    assert found == {
        ("policy", "weights"): 661_632 * 4,
        ("policy", "adapter"): num * 4,
        ("policy", "gradients"): num * 4,
        ("policy", "AdamW"): num * 8,
        ("policy", "engine"): 661_632 * 4,
        ("reference", "weights"): 0,
    }


def test_a_narrow_base_has_wide_adapters() -> None:
    found = shares("models.policy.lora={rank: 8}", "models.policy.dtype=bfloat16")
    assert found["policy", "weights"].num_bytes == 661_632 * 2
    assert found["policy", "adapter"].num_bytes == 69_632 * 4
    assert found["reference", "weights"].num_bytes == 661_632 * 4, "of another type, so it is another model"


def test_a_reference_elsewhere_is_a_copy_of_its_own() -> None:
    sets = ["models.policy.lora={rank: 8}", "pools.other={workers: 1}", "nodes.ref_logprob.pool=other"]
    memory = {each.pool: each for each in measure(load(DEFAULT, sets).plan()).memory}
    assert [(share.model, share.num_bytes) for share in memory["other"].shares if not share.node] == [
        ("reference", 661_632 * 4)
    ]
    assert not any(share.model == "reference" for share in memory["train"].shares)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            "{rank: 8}",
            "policy trains 69,632 parameters beside 661,632 frozen ones (10.52%): rank 8, alpha 32, all-linear",
        ),
        ("{target_modules: [q_proj, v_proj]}", "rank 16, alpha 32, q_proj, v_proj"),
    ],
)
def test_the_plan_says_what_trains(settings: str, line: str) -> None:
    page = " ".join(as_plan(load(DEFAULT, [f"models.policy.lora={settings}"]).plan()).split())
    assert line in page
    assert "lora " not in as_plan(load(DEFAULT).plan())


def test_sizes_that_are_unknown_are_said_to_be() -> None:
    sets = ["models.policy.lora={rank: 8}", "params.base=nobody/nothing"]
    assert "policy trains adapters of unknown size: rank 8" in as_plan(load(DEFAULT, sets).plan())
