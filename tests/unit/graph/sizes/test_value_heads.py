"""What a critic holds and computes, as a plan says it, is what transformers, peft and torch make of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_adapters import KINDS
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from flowrl.graph.sizes.adapters import fault_of_target, num_trained
from flowrl.graph.sizes.architecture import Architecture
from flowrl.graph.sizes.batches import Passes, optimizer_steps
from flowrl.graph.sizes.flops import work_of_passes
from flowrl.graph.sizes.lengths import Lengths
from flowrl.graph.sizes.measure import measure
from flowrl.graph.sizes.model_config import architecture_of
from flowrl.model import LoraSpec, ModelSpec
from flowrl.nodes._backend.lora import training_model
from flowrl.nodes._backend.utilization import update_flops
from flowrl.nodes._backend.values import token_values
from flowrl.pipeline import load
from flowrl.rows import Jagged

DEFAULT = Path(__file__).parents[4] / "pipelines" / "grpo_sync.yaml"
WIDE = {"hidden_size": 160, "intermediate_size": 320, "n_embd": 160, "num_hidden_layers": 8, "n_layer": 8}


def critic(kind: str, folder: Path, wide: bool = False, **settings: Any) -> tuple[Any, Architecture, ModelSpec]:
    config = {**KINDS[kind], **{key: WIDE[key] for key in WIDE if wide and key in KINDS[kind]}}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    spec = ModelSpec(path=str(folder), head="value", trainable=True, **settings)
    found = architecture_of(spec)
    assert isinstance(found, Architecture)
    return training_model(spec), found, spec


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=3)], ids=["whole", "LoRA"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_a_critic_are_counted_as_they_are_made(kind: str, lora: LoraSpec | None, tmp_path: Path) -> None:
    model, architecture, spec = critic(kind, tmp_path, lora=lora)
    sizes = {name: (weight.numel(), weight.requires_grad) for name, weight in model.named_parameters()}
    assert architecture.num_parameters == sum(size for name, (size, _) in sizes.items() if "lora_" not in name)
    assert num_trained(architecture, spec) == sum(size for size, trains in sizes.values() if trains)
    assert fault_of_target(architecture, "lm_head") is not None or architecture.num_experts


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_operations_of_values_are_those_that_torch_counts(kind: str, tmp_path: Path) -> None:
    model, architecture, _ = critic(kind, tmp_path, wide=True)
    rows = np.random.default_rng(0).integers(3, 50, (3, 9))
    prompts = Jagged.of(list(np.repeat(rows, 4, axis=0)), np.int64)
    responses = Jagged.of(list(np.random.default_rng(1).integers(3, 50, (12, 6))), np.int64)
    with FlopCounterMode(display=False) as counter:
        token_values(model, prompts, responses).sum().backward()
    work = work_of_passes(
        Passes("update", True, 1, 3, 3, 4, 1, 1, 8192, Lengths(9, 6)), "m", architecture, Lengths(9, 6)
    )
    assert work.flops == pytest.approx(counter.get_total_flops(), rel=0.06)
    assert work.flops == pytest.approx(update_flops(model, prompts, responses), rel=1e-6)


CRITIC = (
    "models.critic={path: arith-tiny, head: value, trainable: true}",
    "nodes.values={use: model.values, model: critic, pool: train}",
    "nodes.critic_update={use: update.value, model: critic, pool: train, minibatch: 8, reads: {returns: advantages}}",
)


def test_a_plan_holds_a_critic_beside_the_policy_without_the_words() -> None:
    """arith-tiny has 661,632 parameters, 20 x 128 of them in its head, for which the critic has 128."""
    (memory,) = measure(load(DEFAULT, CRITIC).plan()).memory
    held = {share.what: share.num_bytes for share in memory.shares if share.model == "critic"}
    assert held == {"weights": 659_200 * 4, "gradients": 659_200 * 4, "AdamW": 659_200 * 8}
    elsewhere = [*CRITIC, "pools.critic={workers: 1}", "nodes.values.pool=critic", "nodes.critic_update.pool=critic"]
    pools = {each.pool: each for each in measure(load(DEFAULT, elsewhere).plan()).memory}
    assert {share.model for share in pools["critic"].shares} == {"critic"}
    assert not any(share.model == "critic" for share in pools["train"].shares)


def test_steps_in_which_an_update_waits_are_none_of_its_optimizer_steps() -> None:
    plan = load(DEFAULT, [*CRITIC, "nodes.actor_update.after_step=20"]).plan()
    assert optimizer_steps(plan) == {"policy": 80 * 2, "critic": 100 * 4}
    plan = load(DEFAULT, [*CRITIC, "nodes.actor_update.after_step=200"]).plan()
    assert optimizer_steps(plan)["policy"] == 0
