"""Log-probabilities and entropies in chunks against the plain formula, in values and gradients."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flowrl.nodes._backend.chunked import Entropy, Found, Scoring, head_log_probs, in_parts


def plain(head: nn.Module, hidden: Tensor, targets: Tensor, scoring: Scoring) -> Found:
    """The formula, with all logits at once and gradients by torch."""
    logits = head(hidden).to(torch.promote_types(hidden.dtype, torch.float32)) * scoring.scale
    if math.isfinite(scoring.cap):
        logits = scoring.cap * torch.tanh(logits / scoring.cap)
    log_probs = torch.log_softmax(logits / scoring.temperature, dim=-1)
    return log_probs[range(len(targets)), targets], -torch.special.xlogy(log_probs.exp(), log_probs.exp()).sum(-1)


def everything(found: Found, pull: Tensor, entropy: Entropy, tensors: list[Tensor]) -> list[Tensor]:
    """Values, and gradients of a loss in which each token pulls differently; some not at all."""
    loss = (found[0] * pull).sum() + ((found[1] * pull.flip(0)).sum() if entropy == "gradient" else 0.0)
    return [*(each.detach() for each in found), *torch.autograd.grad(loss, tensors)]


@given(
    num_tokens=st.integers(0, 17),
    num_words=st.integers(2, 40),
    width=st.integers(1, 9),
    bias=st.booleans(),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    scale=st.sampled_from([0.25, 1.0, 3.0]),
    cap=st.sampled_from([1.5, 30.0, math.inf]),
    entropy=st.sampled_from(["none", "value", "gradient"]),
    scores_at_a_time=st.integers(1, 500),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**31),
)
def test_chunks_of_any_size_give_what_the_formula_does(
    num_tokens: int, num_words: int, width: int, bias: bool, temperature: float, scale: float, cap: float,
    entropy: Entropy, scores_at_a_time: int, dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    head = nn.Linear(width, num_words, bias=bias, dtype=dtype)
    hidden = torch.randn(num_tokens, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(num_words, (num_tokens,))
    pull = torch.randn(num_tokens, dtype=dtype) * (torch.rand(num_tokens) < 0.7)
    scoring = Scoring(temperature, entropy, scale, cap, scores_at_a_time)
    inputs = [hidden, *head.parameters()]
    expected = plain(head, hidden, targets, scoring)
    if entropy == "none":
        expected = expected[0], torch.zeros_like(expected[1])
    wanted = everything(expected, pull, entropy, inputs)
    lora = nn.Sequential(head)  # any other module
    ways = [
        head_log_probs(head, hidden, targets, scoring, num_words),
        head_log_probs(lora, hidden, targets, scoring, num_words),
        in_parts(scoring.of, head(hidden), targets, scoring, num_words),
    ]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for found in ways:
        for mine, theirs in zip(everything(found, pull, entropy, inputs), wanted, strict=True):
            assert mine.dtype == theirs.dtype
            size = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
            torch.testing.assert_close(mine, theirs, rtol=0, atol=4 * tolerance * size)


def test_gradients_are_those_of_finite_differences() -> None:
    torch.manual_seed(0)
    head = nn.Linear(3, 5, dtype=torch.float64)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> Found:
        from flowrl.nodes._backend.chunked import _Linear

        found: Found = _Linear.apply(
            Scoring(0.7, "gradient", 2.0, 3.0, 10), torch.tensor([0, 4, 2, 2]), hidden, weight, bias
        )
        return found

    assert torch.autograd.gradcheck(scores, (hidden, head.weight, head.bias))
