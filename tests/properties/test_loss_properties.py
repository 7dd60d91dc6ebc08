"""The loss of a mini-batch and its gradient do not depend on how the rows are cut, ordered, spread or masked."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.nodes._backend.losses import Aggregation, KlKind, aggregate, denominator, entropy, kl, policy_loss, within
from flowrl.partition import plan_micro_batches
from flowrl.rows import Jagged

MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
VOCABULARY = 5
MAX_TOKENS = 8


@dataclass
class Tokens:
    """A mini-batch of unequal rows: logits (T, V) of which the gradient is taken, and columns (T,)."""

    lengths: np.ndarray
    logits: Tensor
    target: Tensor
    old: Tensor
    ref: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def row(self) -> np.ndarray:
        return np.arange(len(self.lengths)).repeat(self.lengths)

    def positions(self, rows: np.ndarray) -> Tensor:
        """Positions of the tokens of these rows, row by row."""
        every = Jagged.of([np.flatnonzero(self.row == row) for row in range(len(self.lengths))], np.int64)
        return torch.from_numpy(every.take(rows).values)


@st.composite
def mini_batches(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> Tokens:
    lengths = np.array(draw(st.lists(st.integers(0, 6), min_size=1, max_size=7)), dtype=np.int64)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_tokens = int(lengths.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    logits = normal(num_tokens, VOCABULARY)
    target = torch.randint(VOCABULARY, (num_tokens,), generator=generator)
    mine = torch.log_softmax(logits, -1).gather(1, target[:, None])[:, 0]
    mask = torch.rand(num_tokens, generator=generator) < 0.7
    old, ref = mine + 0.4 * normal(num_tokens), mine + 0.4 * normal(num_tokens)
    return Tokens(lengths, logits, target, old, ref, normal(num_tokens), mask)


def share(tokens: Tokens, logits: Tensor, rows: np.ndarray, mode: Aggregation, kind: KlKind, total: float) -> Tensor:
    """policy + 0.1 KL - 0.01 entropy of these rows, as an update node computes it for a micro-batch."""
    at = tokens.positions(rows)
    row, mask = torch.from_numpy(tokens.row)[at], tokens.mask[at]
    log_probs = within(mask, torch.log_softmax(logits[at], -1).gather(1, tokens.target[at, None])[:, 0])
    policy, _ = policy_loss(log_probs, within(mask, tokens.old[at]), within(mask, tokens.advantages[at]))
    divergence, _ = kl(log_probs, within(mask, tokens.ref[at]), kind)
    token_loss = policy + 0.1 * divergence - 0.01 * within(mask, entropy(logits[at]))
    return aggregate(token_loss, row, mask, mode, total)


def loss_and_gradient(
    tokens: Tokens, parts: list[np.ndarray], mode: Aggregation, kind: KlKind = "k3"
) -> tuple[float, Tensor]:
    """The shares of the parts, summed, each with a backward pass of its own as under gradient accumulation."""
    logits = tokens.logits.clone().requires_grad_()
    total = denominator(tokens.mask, torch.from_numpy(tokens.row), mode, MAX_TOKENS)
    value = 0.0
    for part in parts:
        loss = share(tokens, logits, part, mode, kind, total)
        loss.backward()
        value += loss.item()
    assert logits.grad is not None
    return value, logits.grad


def assert_same(actual: tuple[float, Tensor], expected: tuple[float, Tensor], tolerance: float = 1e-6) -> None:
    assert actual[0] == pytest.approx(expected[0], abs=tolerance)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=tolerance)


def whole(tokens: Tokens) -> list[np.ndarray]:
    return [np.arange(len(tokens.lengths))]


@given(tokens=mini_batches(), mode=st.sampled_from(MODES), kind=st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_micro_batches_of_1_2_or_all_rows_give_the_same(tokens: Tokens, mode: Aggregation, kind: KlKind) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), mode, kind)
    rows = np.arange(len(tokens.lengths))
    for size in (1, 2):
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        assert_same(loss_and_gradient(tokens, parts, mode, kind), expected, 1e-12)


@given(tokens=mini_batches(torch.float32), mode=st.sampled_from(MODES))
def test_float32_shares_add_up_to_1e_6(tokens: Tokens, mode: Aggregation) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), mode)
    parts = [np.array([row]) for row in range(len(tokens.lengths))]
    scale = max(1.0, abs(expected[0]))
    assert_same(loss_and_gradient(tokens, parts, mode), expected, 1e-6 * scale)


@given(tokens=mini_batches(), mode=st.sampled_from(MODES), data=st.data())
def test_row_order_changes_nothing(tokens: Tokens, mode: Aggregation, data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(tokens.lengths)))))
    expected = loss_and_gradient(tokens, whole(tokens), mode)
    assert_same(loss_and_gradient(tokens, [order], mode), expected, 1e-12)


@given(tokens=mini_batches(), mode=st.sampled_from(MODES), num_ranks=st.integers(1, 3), max_rows=st.integers(1, 4))
def test_ranks_and_their_micro_batches_change_nothing(
    tokens: Tokens, mode: Aggregation, num_ranks: int, max_rows: int
) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), mode)
    plans = [plan_micro_batches(tokens.lengths, num_ranks, rank, max_rows=max_rows) for rank in range(num_ranks)]
    parts = [batch.rows for plan in plans for batch in plan if not batch.excluded]
    assert_same(loss_and_gradient(tokens, parts, mode), expected, 1e-12)


@given(tokens=mini_batches(), mode=st.sampled_from(MODES), data=st.data())
def test_a_random_split_into_ranks_changes_nothing(tokens: Tokens, mode: Aggregation, data: st.DataObject) -> None:
    num_rows = len(tokens.lengths)
    rank_of = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
    row = torch.from_numpy(tokens.row)
    parts = [np.flatnonzero(rank_of == rank) for rank in range(3)]
    # Each rank may count its own rows: denominators add up.
    counted = [denominator(tokens.mask[at], row[at], mode, MAX_TOKENS) for at in map(tokens.positions, parts)]
    assert sum(counted) == denominator(tokens.mask, row, mode, MAX_TOKENS)
    assert_same(loss_and_gradient(tokens, parts, mode), loss_and_gradient(tokens, whole(tokens), mode), 1e-12)


@given(tokens=mini_batches(), mode=st.sampled_from(MODES), poison=st.sampled_from([math.nan, math.inf, -math.inf, 0]))
def test_what_lies_outside_the_mask_changes_nothing(tokens: Tokens, mode: Aggregation, poison: float) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), mode)
    outside = ~tokens.mask
    for column in (tokens.old, tokens.ref, tokens.advantages):
        column[outside] = poison
    actual = loss_and_gradient(tokens, whole(tokens), mode)
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])
    assert (actual[1][outside] == 0).all()


@given(tokens=mini_batches(), mode=st.sampled_from(MODES), num_added=st.integers(1, 4))
def test_added_masked_tokens_and_rows_change_nothing(tokens: Tokens, mode: Aggregation, num_added: int) -> None:
    value, gradient = loss_and_gradient(tokens, whole(tokens), mode)
    junk = torch.full((num_added,), math.nan, dtype=torch.float64)
    longer = Tokens(
        lengths=np.append(tokens.lengths, num_added),
        logits=torch.cat([tokens.logits, torch.ones(num_added, VOCABULARY, dtype=torch.float64)]),
        target=torch.cat([tokens.target, torch.zeros(num_added, dtype=torch.int64)]),
        old=torch.cat([tokens.old, junk]),
        ref=torch.cat([tokens.ref, junk]),
        advantages=torch.cat([tokens.advantages, junk]),
        mask=torch.cat([tokens.mask, torch.zeros(num_added, dtype=torch.bool)]),
    )
    padded = torch.cat([gradient, torch.zeros(num_added, VOCABULARY, dtype=torch.float64)])
    assert_same(loss_and_gradient(longer, whole(longer), mode), (value, padded), 1e-12)


@given(
    log_ratios=st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=8),
    advantage=st.floats(-10, 10, width=32),
    kind=st.sampled_from(["k1", "k2", "k3", "abs"]),
)
def test_values_and_gradients_are_finite_at_any_log_ratio(
    log_ratios: list[float], advantage: float, kind: KlKind
) -> None:
    log_probs = torch.tensor(log_ratios, requires_grad=True)
    anchor = torch.zeros(len(log_ratios))
    loss, _ = policy_loss(log_probs, anchor, torch.full_like(anchor, advantage))
    divergence, clamped = kl(log_probs, anchor, kind)
    (of_loss,) = torch.autograd.grad(loss.sum(), log_probs)
    (of_divergence,) = torch.autograd.grad(divergence.sum(), log_probs)
    assert all(values.isfinite().all() for values in (loss, divergence, of_loss, of_divergence))
    assert (of_divergence[clamped] == 0).all()


@given(logits=st.lists(st.floats(-50, 50), min_size=2, max_size=6))
def test_entropy_lies_between_0_and_that_of_the_uniform(logits: list[float]) -> None:
    value = entropy(torch.tensor(logits, dtype=torch.float64)).item()
    assert -1e-12 <= value <= math.log(len(logits)) + 1e-12
