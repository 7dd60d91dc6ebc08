"""LoRA: only adapters train, engines get W + scaling * B A, and the reference is the model with the adapter off."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_weights import load, only_bucket
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from trajectories import trajectories

from flowrl.model import LoraSpec, ModelSpec, OptimizerSpec
from flowrl.model_files import ModelError
from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Request, Sampling
from flowrl.nodes._backend.export import save_adapter, save_model
from flowrl.nodes._backend.generation import TransformersEngine
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.lora import adapted_layers, adapters_off, training_model
from flowrl.nodes._backend.models import load_model
from flowrl.nodes._backend.trainer import Trainer, trainer_of
from flowrl.nodes._backend.weights import buckets, manifest_of, named_weights, tensor_of
from flowrl.nodes.model.logprob import Logprob
from flowrl.nodes.update.policy import Policy
from flowrl.rows import Jagged


def spec_of(path: str = "arith-tiny", dtype: Any = "float32", **lora: Any) -> ModelSpec:
    optimizer = OptimizerSpec(lr=1e-2)
    return ModelSpec(path=path, trainable=True, dtype=dtype, lora=LoraSpec(**lora), optimizer=optimizer)


def changed(model: Any, size: float = 0.1) -> Any:
    """The model with adapters that add something."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(size * torch.randn_like(parameter))
    return model


def expected_weights(model: Any, plain: Any) -> dict[str, torch.Tensor]:
    """W0 + scaling * B A by hand, from the parameters by their names in peft."""
    state, found = model.state_dict(), dict(named_weights(plain))
    for name in adapted_layers(model):
        if f"{name}.lora_A.default.weight" in state:
            product = state[f"{name}.lora_B.default.weight"] @ state[f"{name}.lora_A.default.weight"]
        else:
            product = (state[f"{name}.lora_embedding_B.default"] @ state[f"{name}.lora_embedding_A.default"]).T
        weight = found[f"{name}.weight"].detach()
        lora = model.peft_config["default"]
        product = product.T if weight.shape != product.shape or "Conv1D" in repr(model.get_submodule(name)) else product
        found[f"{name}.weight"] = weight + lora.lora_alpha / (lora.r**0.5 if lora.use_rslora else lora.r) * product
    return {name: value.detach() for name, value in found.items()}


TARGETS: Mapping[str, Any] = {
    "arith-tiny": ["q_proj", "down_proj", "lm_head", "embed_tokens"],
    "qwen2": "all-linear",
    "gpt2": "all-linear",
}


@pytest.mark.parametrize("kind", TARGETS)
def test_engines_get_the_merged_weights_under_the_plain_names(kind: str, model_folder: Callable[[str], Path]) -> None:
    path = kind if kind == "arith-tiny" else str(model_folder(kind))
    rslora = kind == "qwen2"
    model = changed(training_model(spec_of(path, rank=3, alpha=5, rslora=rslora, target_modules=TARGETS[kind])))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = load_model(ModelSpec(path=path))
    sent = only_bucket(model, verify=True)
    assert sent.begins is not None
    assert sent.arrays.keys() == named_weights(plain).keys()
    assert sent.begins.manifest == manifest_of(plain)
    wanted = expected_weights(model, plain)
    for name, array in sent.arrays.items():
        torch.testing.assert_close(torch.from_numpy(array), wanted[name], atol=1e-6, rtol=0)
    assert sum(not torch.equal(wanted[name], weight) for name, weight in named_weights(plain).items()) == len(
        adapted_layers(model)
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    load(buckets(model, "float32", 20_000, verify=True), plain)


@pytest.mark.parametrize("kind", TARGETS)
def test_an_engine_generates_and_scores_as_the_trainer_does(kind: str, model_folder: Callable[[str], Path]) -> None:
    path = kind if kind == "arith-tiny" else str(model_folder(kind))
    model = changed(training_model(spec_of(path, rank=3, alpha=5, target_modules=TARGETS[kind])))
    engine = TransformersEngine(ModelSpec(path=path), "cpu", ChatFormat(), 64)
    (bucket,) = buckets(model, "float32", 1 << 40, verify=True)
    assert bucket.begins is not None
    engine.begin_update(bucket.begins)
    engine.load_bucket(bucket)
    engine.finish_update(1)
    prompts = [[3, 12, 4], [5, 13, 6, 7], [9]]
    (*blocks,) = engine.generate([Request(ids, [0]) for ids in prompts], Sampling(6, 0.01))
    found = {each.request: each.sessions[0] for block in blocks for each in block}
    for position, ids in enumerate(prompts):
        got = found[position]
        with torch.no_grad():
            for token in got.ids:  # type: ignore[union-attr]
                assert int(model(torch.tensor([ids])).logits[0, -1].argmax()) == token
                ids = [*ids, int(token)]
    (*blocks,) = engine.generate([Request(ids, [1, 2, 3]) for ids in prompts], Sampling(6, 1.0))
    sessions = [(prompts[each.request], got) for block in blocks for each in block for got in each.sessions]
    rows = [Jagged.of(part, np.int64) for part in zip(*((ids, got.ids) for ids, got in sessions), strict=True)]  # type: ignore[union-attr]
    log_probs, _ = token_log_probs(model, *rows, 1.0)
    sampled = np.concatenate([got.log_probs for _, got in sessions])  # type: ignore[union-attr]
    np.testing.assert_allclose(log_probs.detach().numpy(), sampled, atol=1e-5)


def test_a_bfloat16_base_has_float32_adapters_and_is_rounded_once() -> None:
    model = changed(training_model(spec_of(dtype="bfloat16", rank=2)), 0.01)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    wanted = expected_weights(model, load_model(ModelSpec(path="arith-tiny", dtype="bfloat16")))
    for dtype in ("bfloat16", "float32"):
        sent = only_bucket(model, dtype).arrays
        for name, weight in wanted.items():
            assert torch.equal(tensor_of(sent[name], dtype), weight.to(getattr(torch, dtype))), name


def updated(context: Context, **settings: Any) -> Trainer:
    node, batch = Policy(**{"minibatch": 2, **settings}), trajectories()
    node.setup(context)
    node.run(**batch.columns)  # type: ignore[arg-type]
    return trainer_of(context)


def context_of(spec: ModelSpec, **more: Any) -> Context:
    models = {"policy": spec, "reference": ModelSpec(path=spec.path, dtype=spec.dtype)}
    return Context(model="policy", models=models, trained=("policy",), **more)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_update_changes_the_adapters_alone(dtype: Any) -> None:
    context = context_of(spec_of(dtype=dtype, rank=2))
    trainer = trainer_of(context)
    before = {name: tensor.clone() for name, tensor in trainer.module.state_dict().items()}
    held = [parameter for group in trainer.optimizer.param_groups for parameter in group["params"]]
    assert {id(p) for p in held} == {id(p) for n, p in trainer.module.named_parameters() if "lora_" in n}
    updated(context)
    after = trainer.module.state_dict()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]) == ("lora_" not in name), name


@pytest.mark.parametrize("first", ["policy", "reference"])
def test_the_reference_is_the_base_of_the_policy_on_the_same_worker(first: str) -> None:
    context = context_of(spec_of(rank=4))
    policy, reference = Logprob(), Logprob()
    for name in dict.fromkeys([first, "policy", "reference"]):
        (policy if name == "policy" else reference).setup(replace(context, model=name))
    assert reference._model is policy._model
    batch = trajectories()
    ids = {name: batch.columns[name] for name in ("prompt_ids", "response_ids", "temperature")}
    alone = Logprob()
    alone.setup(replace(context, model="reference", shared={}, trained=()))
    base = alone.run(**ids).log_probs.values  # type: ignore[arg-type]
    for _ in range(2):
        found = reference.run(**ids).log_probs.values  # type: ignore[arg-type]
        np.testing.assert_allclose(found, base, rtol=1e-6, atol=1e-6)  # log-probabilities of made-up tokens are large
        updated(context)
    trained = policy.run(**ids).log_probs.values  # type: ignore[arg-type]
    assert np.abs(trained - found).max() > 1e-3
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in policy._model.named_parameters())


@pytest.mark.parametrize(
    ("changes", "trained"),
    [({}, ()), ({"dtype": "bfloat16"}, ("policy",)), ({"attn_implementation": "eager"}, ("policy",))],
)
def test_a_reference_that_is_elsewhere_or_another_has_weights_of_its_own(
    changes: dict[str, Any], trained: tuple[str, ...]
) -> None:
    context = context_of(spec_of(rank=2))
    models = {**context.models, "reference": ModelSpec(path="arith-tiny", **changes)}
    node = Logprob()
    node.setup(replace(context, models=models, trained=trained, model="reference"))
    assert not adapted_layers(node._model)


def test_the_adapter_comes_back_when_the_reference_fails() -> None:
    model = training_model(spec_of(rank=2))
    with pytest.raises(TypeError), adapters_off(model):
        model(input_ids="no ids")
    assert not any(layer.disable_adapters for layer in adapted_layers(model).values())


def test_dropout_is_drawn_in_updates_only_and_from_the_seed() -> None:
    ids = torch.arange(3, 9)[None]
    model = changed(training_model(spec_of(rank=4, dropout=0.5), seed=3))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model(ids).logits)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, changed(training_model(spec_of(rank=4)))(ids).logits)


def test_first_values_follow_from_the_seed() -> None:
    same, again, other = (training_model(spec_of(rank=2), seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(tensor, again[name]) for name, tensor in same.items())
    assert not all(torch.equal(tensor, other[name]) for name, tensor in same.items())


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "q_prj"], "has 'q_prj', but no layer has that name; did you mean 'q_proj'?"),
        (["mlp"], "'model.layers.0.mlp' is a LlamaMLP; known: down_proj, "),
        (["proj"], "no layer has that name"),
    ],
)
def test_names_that_are_no_layers_are_refused_with_those_that_are(targets: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message.replace("?", r"\?")):
        training_model(spec_of(target_modules=targets))


def test_tied_embeddings_have_no_adapter(model_folder: Callable[[str], Path]) -> None:
    for name, other in (("lm_head", "model.embed_tokens"), ("embed_tokens", "lm_head")):
        with pytest.raises(ModelError, match=rf"'{name}', whose weights are those of '{other}' too"):
            training_model(spec_of(str(model_folder("qwen2")), target_modules=[name]))


def trained_adapter(spec: ModelSpec) -> tuple[Any, Trainer]:
    """A model of its own that has taken over what a trainer's checkpoint holds, and that trainer."""
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    trainer = updated(context_of(spec))
    state, moments = get_state_dict(trainer.module, trainer.optimizer, options=options)
    assert state
    assert all("lora_" in name for name in state)
    other = Trainer(context_of(spec, seed=9))
    set_state_dict(other.module, other.optimizer, model_state_dict=state, optim_state_dict=moments, options=options)
    one, two = (t.optimizer.state_dict()["state"] for t in (trainer, other))
    assert all(torch.equal(one[key]["exp_avg_sq"], two[key]["exp_avg_sq"]) for key in one)
    return other.module, trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_exported_model_has_the_weights_of_the_engine(dtype: Any, tmp_path: Path) -> None:
    spec = spec_of(dtype=dtype, rank=3)
    module, trainer = trained_adapter(spec)
    save_model(module, spec, tmp_path / "whole")
    sent = only_bucket(trainer.module, dtype).arrays
    exported = load_model(ModelSpec(path=str(tmp_path / "whole"), dtype=dtype))
    assert {name: tensor.dtype for name, tensor in exported.state_dict().items()} == {
        name: getattr(torch, dtype) for name in sent
    }
    for name, tensor in named_weights(exported).items():
        assert torch.equal(tensor, tensor_of(sent[name], dtype))
    assert (tmp_path / "whole" / "tokenizer.json").is_file()


@pytest.mark.parametrize("kind", ["arith-tiny", "gpt2"])
def test_peft_loads_the_exported_adapter(kind: str, tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    from peft import AutoPeftModelForCausalLM

    path = kind if kind == "arith-tiny" else str(model_folder(kind))
    spec = spec_of(path, rank=3, alpha=7, target_modules=TARGETS[kind])
    module = changed(training_model(spec))
    save_adapter(module, spec, tmp_path / "adapter")
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, module(ids).logits)
        assert not torch.allclose(loaded(ids).logits, load_model(ModelSpec(path=path))(ids).logits, atol=1e-2)
