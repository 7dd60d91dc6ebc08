"""`token_log_probs` against one row at a time without padding, for models with absolute and with rotary positions."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flowrl.nodes._backend.inputs import padded_inputs
from flowrl.nodes._backend.logprob import shared_prompts, token_log_probs
from flowrl.nodes._backend.policy_losses import clip
from flowrl.rows import Jagged

VOCABULARY, MAX_POSITIONS = 23, 24
PROMPT_LENGTHS, RESPONSE_LENGTHS = [1, 5, 3, 16, 2], [4, 0, 1, 7, 20]


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=MAX_POSITIONS, n_embd=16, n_layer=2, n_head=2)
    ).eval()


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_POSITIONS,
        )
    ).eval()


@pytest.fixture(params=[gpt2, llama], ids=["gpt2", "llama"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = request.param()
    for parameter in made.parameters():
        if parameter.ndim > 1:  # a fresh model is nearly uniform, which would hide mistakes
            parameter.data.mul_(4.0)
    return made


@pytest.fixture
def one_process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def ids(lengths: list[int], seed: int) -> Jagged:
    generator = np.random.default_rng(seed)
    return Jagged.of([generator.integers(0, VOCABULARY, length) for length in lengths], np.int64)


def one_by_one(model: nn.Module, prompts: Jagged, responses: Jagged, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies, each row on its own, all logits computed."""
    log_probs, entropies = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        logits = model(input_ids=torch.tensor([*prompt, *response])[None]).logits[0]
        distribution = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
        log_probs.append(distribution.gather(1, torch.tensor(response)[:, None])[:, 0])
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    return torch.cat(log_probs), torch.cat(entropies)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_padded_batch_equals_rows_one_by_one(model: nn.Module, temperature: float) -> None:
    # Each row fits the model's 24 positions, the padded width 16 + 20 - 1 does not: positions must not count padding.
    prompts, responses = ids(PROMPT_LENGTHS, 1), ids(RESPONSE_LENGTHS, 2)
    log_probs, entropies = token_log_probs(model, prompts, responses, temperature, entropy="value")
    expected, expected_entropies = one_by_one(model, prompts, responses, temperature)
    assert entropies is not None
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=0, atol=1e-5)


def test_gradients_of_a_padded_batch_equal_those_of_rows_one_by_one(model: nn.Module) -> None:
    prompts, responses = ids(PROMPT_LENGTHS, 1), ids(RESPONSE_LENGTHS, 2)
    padded = torch.autograd.grad(
        token_log_probs(model, prompts, responses, 1.0)[0].mean(), list(model.parameters()), allow_unused=True
    )
    single = torch.autograd.grad(
        one_by_one(model, prompts, responses, 1.0)[0].mean(), list(model.parameters()), allow_unused=True
    )
    for mine, expected in zip(padded, single, strict=True):
        assert mine is not None and expected is not None
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_packed_rows_equal_rows_one_by_one(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU transformers makes a mask of the positions; flash attention tells rows apart by them itself."""
    monkeypatch.setattr("flowrl.nodes._backend.logprob.packs", lambda model: True)
    prompts, responses = ids(PROMPT_LENGTHS, 1), ids(RESPONSE_LENGTHS, 2)
    assert shared_prompts(model, prompts).packed
    packed, _ = token_log_probs(model, prompts, responses, 0.7)
    expected, _ = one_by_one(model, prompts, responses, 0.7)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-5)
    gradients = (torch.autograd.grad(each.mean(), list(model.parameters())) for each in (packed, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_padding_of_any_width_changes_nothing(model: nn.Module) -> None:
    prompts, responses = ids([3], 1), ids([4], 2)
    alone, _ = token_log_probs(model, prompts, responses, 1.0)
    # A second row with prompt 8 and response 9 puts five columns of padding on each side of the first.
    beside, _ = token_log_probs(
        model, Jagged.concat([prompts, ids([8], 3)]), Jagged.concat([responses, ids([9], 4)]), 1.0
    )
    torch.testing.assert_close(beside[:4], alone, rtol=0, atol=1e-5)


def test_a_wrapped_model_gives_the_same(model: nn.Module, one_process_group: None) -> None:
    prompts, responses = ids(PROMPT_LENGTHS, 1), ids(RESPONSE_LENGTHS, 2)
    wrapped, _ = token_log_probs(DistributedDataParallel(model), prompts, responses, 1.0)
    plain, _ = token_log_probs(model, prompts, responses, 1.0)
    torch.testing.assert_close(wrapped, plain, rtol=0, atol=0)
    wrapped.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_no_rows_give_empty_tensors(model: nn.Module) -> None:
    log_probs, entropies = token_log_probs(model, ids([], 1), ids([], 2), 1.0, entropy="value")
    assert log_probs.shape == (0,) and entropies is not None and entropies.shape == (0,)


def test_empty_responses_stay_connected_to_the_graph(model: nn.Module) -> None:
    log_probs, entropies = token_log_probs(model, ids([2, 3], 1), ids([0, 0], 2), 1.0)
    assert log_probs.shape == (0,) and entropies is None
    log_probs.sum().backward()
    assert all(parameter.grad is not None and (parameter.grad == 0).all() for parameter in model.parameters())


def test_rows_of_a_larger_array_are_read_by_their_offsets(model: nn.Module) -> None:
    prompts, responses = ids(PROMPT_LENGTHS, 1), ids(RESPONSE_LENGTHS, 2)
    tail = token_log_probs(
        model, Jagged(prompts.values, prompts.offsets[2:]), Jagged(responses.values, responses.offsets[2:]), 1.0
    )[0]
    every, _ = token_log_probs(model, prompts, responses, 1.0)
    torch.testing.assert_close(tail, every[responses.offsets[2] :], rtol=0, atol=1e-5)


def test_padded_inputs_by_hand() -> None:
    prompts, responses = Jagged.of([[1, 2, 3], [4]], np.int64), Jagged.of([[5], [6, 7, 8]], np.int64)
    tokens, mask = padded_inputs(prompts, responses)
    assert tokens.tolist() == [[1, 2, 3, 5, 0], [0, 0, 4, 6, 7]]  # the 8 predicts nothing
    assert mask.tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


class FixedLogits(nn.Module):
    """Gives logits [2, 0, 0] at every position, and ignores `logits_to_keep` as a few models do."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([2.0, 0.0, 0.0]))

    def forward(self, input_ids: Tensor, **ignored: object) -> "FixedLogits.Output":
        return self.Output(self.logits.expand(*input_ids.shape, 3))

    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits


def test_the_ratio_before_any_update_is_1_at_the_sampling_temperature() -> None:
    # z = [2, 0, 0], T = 0.5: log softmax(4, 0, 0) = 4 - ln(e⁴ + 2) = -0.035976.
    # Forgetting T gives a probability of 0.787 against 0.965: a ratio of 0.816.
    prompts, responses = Jagged.of([[1]], np.int64), Jagged.of([[0, 0]], np.int64)
    sampled = torch.full((2,), -0.035976)
    log_probs, _ = token_log_probs(FixedLogits(), prompts, responses, temperature=0.5)
    torch.testing.assert_close(log_probs, sampled, rtol=0, atol=1e-6)
    loss, _ = clip(log_probs, sampled, torch.ones(2))
    torch.testing.assert_close(loss, -torch.ones(2), rtol=0, atol=1e-6)
