"""Heads and what models do behind them: scored in the head's forward pass, the result is that of all logits."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from flowrl.nodes._backend.chunked import Scoring
from flowrl.nodes._backend.head import Tail, tail_of
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.rows import Jagged

VOCABULARY = 211
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def lora_on_the_head() -> nn.Module:
    return get_peft_model(llama(), LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False))


def llama(**changes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **changes))


class Masked(LlamaForCausalLM):
    """Makes some words impossible behind its head, as a few models do with the codes of images."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits[..., 5:9] = -1.0e4
        return output


class InPlace(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits.mul_(0.5)
        return output


class TwoHeads(LlamaForCausalLM):
    """Calls its head more than once."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + self.lm_head(torch.ones(1, 1, self.config.hidden_size))
        return output


GPT = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
GEMMA = {**SIZES, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
MODELS: dict[str, tuple[Callable[[], nn.Module], Tail | None]] = {
    "llama": (llama, Tail(1.0, math.inf)),
    "tied": (lambda: llama(tie_word_embeddings=True), Tail(1.0, math.inf)),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2Config(**GPT)), Tail(1.0, math.inf)),
    "gptj": (lambda: GPTJForCausalLM(GPTJConfig(**GPT, rotary_dim=4)), Tail(1.0, math.inf)),
    "phi": (lambda: PhiForCausalLM(PhiConfig(**SIZES)), Tail(1.0, math.inf)),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA, final_logit_softcapping=3.0)), Tail(1.0, 3.0)),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.0625)), Tail(0.0625, math.inf)),
    "granite": (lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)), Tail(0.125, math.inf)),
    "lora": (lora_on_the_head, Tail(1.0, math.inf)),
    "masked": (lambda: Masked(LlamaConfig(**SIZES)), None),
    "in place": (lambda: InPlace(LlamaConfig(**SIZES)), None),
    "two heads": (lambda: TwoHeads(LlamaConfig(**SIZES)), None),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4.0)  # a fresh model is nearly uniform, which would hide mistakes
    return model


def rows() -> tuple[Jagged, Jagged]:
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, VOCABULARY, length) for length in (1, 5, 3)]
    responses = [generator.integers(3, VOCABULARY, length) for length in (4, 0, 1, 7, 9)]
    return Jagged.of([prompts[each] for each in (0, 1, 1, 2, 2)], np.int64), Jagged.of(responses, np.int64)


def by_all_logits(model: nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
    """Each row on its own."""
    log_probs, entropies = [], []
    for prompt, response in zip(*rows(), strict=True):
        logits = model(input_ids=torch.tensor([*prompt, *response])[None], use_cache=False).logits[0]
        every = torch.log_softmax(logits.float() / temperature, dim=-1)[len(prompt) - 1 : -1]
        log_probs.append(every[range(len(response)), response])
        entropies.append(-(every.exp() * every).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


def gradients(model: nn.Module, found: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    assert found[1] is not None
    pull = torch.linspace(-1, 1, len(found[0]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad((found[0] * pull).sum() + 0.3 * found[1].sum(), trained, materialize_grads=True))


@pytest.mark.parametrize("name", MODELS)
def test_the_result_is_that_of_all_logits(name: str) -> None:
    model = made(name)
    found = token_log_probs(model, *rows(), 0.7, "gradient")
    expected = by_all_logits(model, 0.7)
    assert found[1] is not None
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-6, atol=1e-5)
    for mine, theirs in zip(gradients(model, found), gradients(model, expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5 * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("name", MODELS)
def test_what_a_model_does_behind_its_head_is_found_out(name: str) -> None:
    model = made(name)
    token_log_probs(model, *rows(), 1.0)
    assert tail_of(model, lambda: pytest.fail("asked twice")) == MODELS[name][1]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_left_as_it_was(name: str) -> None:
    model = made(name)
    ids = torch.arange(3, 9)[None]
    before = model(input_ids=ids).logits
    token_log_probs(model, *rows(), 1.0)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Largest(TorchDispatchMode):
    """The number of values of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            self.size = max(self.size, each.numel() if isinstance(each, Tensor) else 0)
        return found


@pytest.mark.parametrize("name", ["tied", "gemma2", "lora"])
def test_no_tensor_holds_the_logits_of_more_tokens_than_are_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scores = made(name), 5 * VOCABULARY
    monkeypatch.setattr("flowrl.nodes._backend.logprob.Scoring", lambda *args: Scoring(*args, scores_at_a_time=scores))
    prompts = Jagged.of([np.arange(3, 9)] * 6, np.int64)
    responses = Jagged.of([np.arange(3, 13)] * 6, np.int64)
    weights = max(parameter.numel() for parameter in model.parameters())
    with Largest() as largest:
        log_probs, entropies = token_log_probs(model, prompts, responses, 1.0, "gradient")
        assert entropies is not None
        (log_probs + entropies).sum().backward()
    assert largest.size <= max(scores, weights, 6 * 9 * 64)


def test_statistics_are_float32_under_autocast() -> None:
    model = made("llama")
    with torch.autocast("cpu", torch.bfloat16):
        found = token_log_probs(model, *rows(), 0.7, "gradient")
        expected = by_all_logits(model, 0.7)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.15)
    for mine, theirs in zip(gradients(model, found), gradients(model, expected), strict=True):
        assert mine.dtype == torch.float32
        assert (
            torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.999 or not theirs.any()
        )
