"""A critic: the value of the state before each token, by a linear layer on hidden states; loaded, adapted, saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from flowrl.model import LoraSpec, ModelSpec, base_of
from flowrl.model_files import ASSETS, ModelError
from flowrl.node import Context
from flowrl.nodes._backend.export import export_model
from flowrl.nodes._backend.lora import training_model
from flowrl.nodes._backend.trainer import Trainer
from flowrl.nodes._backend.value_head import load_headed
from flowrl.nodes._backend.values import token_values
from flowrl.rows import Jagged

CLASSIFIER = str(ASSETS.parent / "_backend" / "toy_classifier")
GENERATOR = np.random.default_rng(0)
# Each row fits a model of 24 positions; a rectangle of the longest prompt and response would not.
PROMPTS = Jagged.of([GENERATOR.integers(2, 20, length) for length in (1, 5, 3, 16, 2)], np.int64).take(
    np.array([0, 1, 1, 2, 3, 4, 1])
)
RESPONSES = Jagged.of([GENERATOR.integers(2, 20, length) for length in (4, 0, 3, 1, 7, 20, 2)], np.int64)


def critic(path: str, **settings: Any) -> Any:
    """A critic of a model, with a head that is not 0."""
    model = training_model(ModelSpec(path=path, head="value", trainable=True, **settings))
    torch.manual_seed(1)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    return model


def one_by_one(model: Any) -> Tensor:
    """Values, each row on its own, from the hidden states of the model under its head."""
    head, found = model.get_output_embeddings().weight[0], []
    base = getattr(model, model.base_model_prefix)
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        hidden = base(input_ids=torch.tensor([*prompt, *response])[None]).last_hidden_state[0]
        found.append(hidden[len(prompt) - 1 : -1] @ head)
    return torch.cat(found)


@pytest.fixture(params=["gpt2", "qwen2", "recomputed", "packed"])
def model(request: pytest.FixtureRequest, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Learned positions, tied embeddings, prompts that are read once for each response, rows without padding."""
    if request.param == "packed":
        monkeypatch.setattr("flowrl.nodes._backend.logprob.packs", lambda model: True)
    if request.param == "recomputed":
        monkeypatch.setattr("flowrl.nodes._backend.logprob._shared_cache", lambda model: None)
    return critic(str(model_folder("gpt2" if request.param == "gpt2" else "qwen2")))


def test_values_and_their_gradients_are_those_of_rows_one_by_one(model: Any) -> None:
    found, expected = token_values(model, PROMPTS, RESPONSES), one_by_one(model)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    gradients = (torch.autograd.grad(each.square().mean(), list(model.parameters())) for each in (found, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_value_knows_what_comes_before_its_token_and_nothing_else(model: Any) -> None:
    other = RESPONSES.values.copy()
    place = int(RESPONSES.offsets[4]) + 3  # the fourth of seven tokens
    other[place] = 21 - other[place]
    before = token_values(model, PROMPTS, RESPONSES)
    after = token_values(model, PROMPTS, Jagged(other, RESPONSES.offsets))
    changed = (~torch.isclose(after, before, rtol=0, atol=1e-5)).nonzero()[:, 0].tolist()
    assert changed == [place + 1, place + 2, place + 3]


def test_a_fresh_critic_says_0_and_one_of_a_reward_model_what_that_would_say() -> None:
    fresh = load_headed(ModelSpec(path="arith-tiny", head="value", trainable=True))
    assert not token_values(fresh, PROMPTS, RESPONSES).any()
    found = token_values(load_headed(ModelSpec(path=CLASSIFIER, head="value")), PROMPTS, RESPONSES)
    judge = AutoModelForSequenceClassification.from_pretrained(CLASSIFIER)
    rows = [[*p, *r][:end] for p, r in zip(PROMPTS, RESPONSES, strict=True) for end in range(len(p), len(p) + len(r))]
    said = [judge(input_ids=torch.tensor(row)[None]).logits[0, 0] for row in rows]
    torch.testing.assert_close(found, torch.stack(said), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_beside_adapters_the_head_trains_too_in_float32(dtype: str, model_folder: Callable[[str], Path]) -> None:
    path = str(model_folder("qwen2"))
    model = critic(path, lora=LoraSpec(rank=2), dtype=dtype)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"lm_head.weight"}
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert not any("lm_head" in name and "lora" in name for name in trained)
    token_values(model, PROMPTS, RESPONSES).sum().backward()
    assert trained["lm_head.weight"].grad is not None
    with pytest.raises(ModelError, match="'lm_head' is a ValueHead"):
        critic(path, lora=LoraSpec(target_modules=["lm_head"]))


def test_a_frozen_critic_is_never_the_base_of_an_adapted_one() -> None:
    adapted = ModelSpec(path=CLASSIFIER, head="value", trainable=True, lora=LoraSpec())
    models = {"critic": adapted, "old": ModelSpec(path=CLASSIFIER, head="value"), "lm": ModelSpec(path=CLASSIFIER)}
    assert base_of("old", models, ["critic"]) is None
    assert base_of("lm", models, ["critic"]) is None


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["whole", "LoRA"])
@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
def test_a_critic_is_written_as_a_classifier_and_loaded_again(
    kind: str, lora: LoraSpec | None, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    spec = ModelSpec(path=str(model_folder(kind)), head="value", trainable=True, lora=lora)
    trainer = Trainer(Context(model="critic", models={"critic": spec}))
    for name, weight in trainer.module.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1 if "lora" in name else 1.0)
    expected = token_values(trainer.module, PROMPTS, RESPONSES)
    export_model(trainer.state()["weights"], spec, tmp_path / "critic")
    for trainable in (True, False):
        again = load_headed(ModelSpec(path=str(tmp_path / "critic"), head="value", trainable=trainable))
        torch.testing.assert_close(token_values(again, PROMPTS, RESPONSES), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelError, match="leave out --adapter"):
        export_model(trainer.state()["weights"], spec, tmp_path / "adapter", adapter=True)


def test_what_gives_no_critic_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'arith-tiny' has no value head.*would say 0.*; trainable: true"):
        load_headed(ModelSpec(path="arith-tiny", head="value"))
    two = AutoModelForSequenceClassification.from_pretrained(CLASSIFIER, num_labels=2, ignore_mismatched_sizes=True)
    two.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a classifier with 2 labels, and a value is a number; give a reward model"):
        load_headed(ModelSpec(path=str(tmp_path), head="value", trainable=True))
