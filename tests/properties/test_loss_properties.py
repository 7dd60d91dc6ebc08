"""The loss of a mini-batch and its gradient do not depend on how the rows are cut, ordered, spread or masked."""

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flowrl.nodes._backend.loss_choice import LOSSES
from flowrl.nodes._backend.losses import aggregate, denominator, entropy, kl, within
from flowrl.nodes._backend.terms import Aggregation, KlKind
from flowrl.partition import plan_micro_batches
from flowrl.rows import Jagged

KINDS = get_args(KlKind)
Choice = tuple[str, Aggregation]
"""A policy loss, and one of the aggregations that it takes."""
CHOICES: list[Choice] = [(name, mode) for name, loss in LOSSES.items() for mode in loss.aggregations]
VOCABULARY = 5
MAX_TOKENS = 8


@dataclass
class Tokens:
    """A mini-batch of unequal rows: logits (T, V) of which the gradient is taken, and columns (T,)."""

    lengths: np.ndarray
    logits: Tensor
    target: Tensor
    columns: dict[str, Tensor]
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
    columns = {name: mine + 0.4 * normal(num_tokens) for name in ("old_log_probs", "ref_log_probs")}
    columns |= {"advantages": normal(num_tokens), "importance_weights": normal(num_tokens).exp()}
    return Tokens(lengths, logits, target, columns, mask)


def share(tokens: Tokens, logits: Tensor, rows: np.ndarray, choice: Choice, kind: KlKind, total: float) -> Tensor:
    """policy + 0.1 KL - 0.01 entropy of these rows, as an update node computes it for a micro-batch."""
    at = tokens.positions(rows)
    row, mask = torch.from_numpy(tokens.row)[at], tokens.mask[at]
    log_probs = within(mask, torch.log_softmax(logits[at], -1).gather(1, tokens.target[at, None])[:, 0])
    columns = {name: within(mask, column[at]) for name, column in tokens.columns.items()}
    columns |= {"log_probs": log_probs, "mask": mask, "row": row}
    policy, _ = LOSSES[choice[0]](columns, {}, columns["importance_weights"])
    divergence, _ = kl(log_probs, columns["ref_log_probs"], kind)
    token_loss = policy + 0.1 * divergence - 0.01 * within(mask, entropy(logits[at]))
    return aggregate(token_loss, row, mask, choice[1], total)


def loss_and_gradient(
    tokens: Tokens, parts: list[np.ndarray], choice: Choice, kind: KlKind = "k3"
) -> tuple[float, Tensor]:
    """The shares of the parts, summed, each with a backward pass of its own as under gradient accumulation."""
    logits = tokens.logits.clone().requires_grad_()
    total = denominator(tokens.mask, torch.from_numpy(tokens.row), choice[1], MAX_TOKENS)
    value = 0.0
    for part in parts:
        loss = share(tokens, logits, part, choice, kind, total)
        loss.backward()
        value += loss.item()
    assert logits.grad is not None
    return value, logits.grad


def assert_same(actual: tuple[float, Tensor], expected: tuple[float, Tensor], tolerance: float = 1e-6) -> None:
    assert actual[0] == pytest.approx(expected[0], abs=tolerance)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=tolerance)


def whole(tokens: Tokens) -> list[np.ndarray]:
    return [np.arange(len(tokens.lengths))]


@given(tokens=mini_batches(), choice=st.sampled_from(CHOICES), kind=st.sampled_from(KINDS))
def test_micro_batches_of_1_2_or_all_rows_give_the_same(tokens: Tokens, choice: Choice, kind: KlKind) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), choice, kind)
    rows = np.arange(len(tokens.lengths))
    for size in (1, 2):
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        assert_same(loss_and_gradient(tokens, parts, choice, kind), expected, 1e-12)


@given(tokens=mini_batches(torch.float32), choice=st.sampled_from(CHOICES))
def test_float32_shares_add_up_to_1e_6(tokens: Tokens, choice: Choice) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), choice)
    parts = [np.array([row]) for row in range(len(tokens.lengths))]
    scale = max(1.0, abs(expected[0]))
    assert_same(loss_and_gradient(tokens, parts, choice), expected, 1e-6 * scale)


@given(tokens=mini_batches(), choice=st.sampled_from(CHOICES), data=st.data())
def test_row_order_changes_nothing(tokens: Tokens, choice: Choice, data: st.DataObject) -> None:
    order = np.array(data.draw(st.permutations(range(len(tokens.lengths)))))
    expected = loss_and_gradient(tokens, whole(tokens), choice)
    assert_same(loss_and_gradient(tokens, [order], choice), expected, 1e-12)


@given(tokens=mini_batches(), choice=st.sampled_from(CHOICES), num_ranks=st.integers(1, 3), max_rows=st.integers(1, 4))
def test_ranks_and_their_micro_batches_change_nothing(
    tokens: Tokens, choice: Choice, num_ranks: int, max_rows: int
) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), choice)
    plans = [plan_micro_batches(tokens.lengths, num_ranks, rank, max_rows=max_rows) for rank in range(num_ranks)]
    parts = [batch.rows for plan in plans for batch in plan if not batch.excluded]
    assert_same(loss_and_gradient(tokens, parts, choice), expected, 1e-12)


@given(tokens=mini_batches(), choice=st.sampled_from(CHOICES), data=st.data())
def test_a_random_split_into_ranks_changes_nothing(tokens: Tokens, choice: Choice, data: st.DataObject) -> None:
    num_rows = len(tokens.lengths)
    rank_of = np.array(data.draw(st.lists(st.integers(0, 2), min_size=num_rows, max_size=num_rows)))
    row = torch.from_numpy(tokens.row)
    parts = [np.flatnonzero(rank_of == rank) for rank in range(3)]
    # Each rank may count its own rows: denominators add up.
    counted = [denominator(tokens.mask[at], row[at], choice[1], MAX_TOKENS) for at in map(tokens.positions, parts)]
    assert sum(counted) == denominator(tokens.mask, row, choice[1], MAX_TOKENS)
    assert_same(loss_and_gradient(tokens, parts, choice), loss_and_gradient(tokens, whole(tokens), choice), 1e-12)


@given(
    tokens=mini_batches(), choice=st.sampled_from(CHOICES), poison=st.sampled_from([math.nan, math.inf, -math.inf, 0])
)
def test_what_lies_outside_the_mask_changes_nothing(tokens: Tokens, choice: Choice, poison: float) -> None:
    expected = loss_and_gradient(tokens, whole(tokens), choice)
    outside = ~tokens.mask
    for column in tokens.columns.values():
        column[outside] = poison
    actual = loss_and_gradient(tokens, whole(tokens), choice)
    assert actual[0] == expected[0]
    assert torch.equal(actual[1], expected[1])
    assert (actual[1][outside] == 0).all()


@given(tokens=mini_batches(), choice=st.sampled_from(CHOICES), num_added=st.integers(1, 4))
def test_added_masked_tokens_and_rows_change_nothing(tokens: Tokens, choice: Choice, num_added: int) -> None:
    value, gradient = loss_and_gradient(tokens, whole(tokens), choice)
    junk = torch.full((num_added,), math.nan, dtype=torch.float64)
    longer = Tokens(
        lengths=np.append(tokens.lengths, num_added),
        logits=torch.cat([tokens.logits, torch.ones(num_added, VOCABULARY, dtype=torch.float64)]),
        target=torch.cat([tokens.target, torch.zeros(num_added, dtype=torch.int64)]),
        columns={name: torch.cat([column, junk]) for name, column in tokens.columns.items()},
        mask=torch.cat([tokens.mask, torch.zeros(num_added, dtype=torch.bool)]),
    )
    padded = torch.cat([gradient, torch.zeros(num_added, VOCABULARY, dtype=torch.float64)])
    assert_same(loss_and_gradient(longer, whole(longer), choice), (value, padded), 1e-12)


@given(
    choice=st.sampled_from(CHOICES),
    log_ratios=st.lists(st.floats(-200, 200, width=32), min_size=1, max_size=8),
    advantages=st.lists(st.floats(-10, 10, width=32), min_size=8, max_size=8),
    kind=st.sampled_from(KINDS),
)
def test_values_and_gradients_are_finite_at_any_log_ratio_and_with_minus_infinity_outside_the_mask(
    choice: Choice, log_ratios: list[float], advantages: list[float], kind: KlKind
) -> None:
    all_log_probs = torch.tensor([*log_ratios, -math.inf], requires_grad=True)
    mask = torch.tensor([True] * len(log_ratios) + [False])
    log_probs, row = within(mask, all_log_probs), torch.arange(len(mask)) // 3
    anchor = torch.zeros(len(mask))
    columns = {"log_probs": log_probs, "old_log_probs": anchor, "mask": mask, "row": row}
    columns |= {"advantages": within(mask, torch.tensor([*advantages[: len(log_ratios)], math.nan]))}
    loss, _ = LOSSES[choice[0]](columns, {}, within(mask, anchor + 0.5))
    divergence, clamped = kl(log_probs, anchor, kind)
    total = denominator(mask, row, choice[1], MAX_TOKENS)
    for values in (loss, divergence):
        (gradient,) = torch.autograd.grad(
            aggregate(values, row, mask, choice[1], total), all_log_probs, retain_graph=True
        )
        assert values[mask].isfinite().all() and gradient.isfinite().all()
        assert gradient[-1] == 0
    (of_divergence,) = torch.autograd.grad(divergence.sum(), all_log_probs)
    assert kind == "k3+" or (of_divergence[clamped] == 0).all()


@given(logits=st.lists(st.floats(-50, 50), min_size=2, max_size=6))
def test_entropy_lies_between_0_and_that_of_the_uniform(logits: list[float]) -> None:
    value = entropy(torch.tensor(logits, dtype=torch.float64)).item()
    assert -1e-12 <= value <= math.log(len(logits)) + 1e-12
