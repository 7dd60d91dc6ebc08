"""Losses against numbers worked by hand, and against an independent implementation (tests/data/README.md)."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl.nodes._backend.loss_choice import LOSSES
from flowrl.nodes._backend.losses import aggregate, denominator, entropy, kl, value_loss, within
from flowrl.nodes._backend.policy_losses import clip
from flowrl.nodes._backend.terms import Aggregation, KlKind

ORACLE: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "core_algorithms.json").read_text())
MODES: tuple[Aggregation, ...] = (
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)
KL_KINDS: tuple[KlKind, ...] = ("k1", "k2", "k3", "abs")


def flat(rows: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in rows for value in row])


def oracle(name: str) -> Tensor:
    return flat(ORACLE["inputs"][name])


def oracle_rows() -> Tensor:
    lengths = torch.tensor(ORACLE["inputs"]["lengths"])
    return torch.arange(len(lengths)).repeat_interleave(lengths)


def close(actual: Tensor | float, expected: Any, tolerance: float = 1e-6) -> None:
    torch.testing.assert_close(
        torch.as_tensor(actual), torch.as_tensor(expected), rtol=0, atol=tolerance, check_dtype=False
    )


@pytest.mark.parametrize(
    ("kind", "log_prob", "value", "gradient"),
    [
        ("k1", -1.0, -1.0, 1.0),  # d = -1 - 1 + 1
        ("k2", -1.0, 0.5, -1.0),  # d²/2; gradient d
        ("k3", -1.0, math.e - 2, 1 - math.e),  # e^1 - 1 - 1 = 0.7183; gradient 1 - e^-d = -1.7183
        ("k3", 2.0, math.exp(-2) + 1, 1 - math.exp(-2)),  # 0.1353 + 2 - 1
        ("abs", -1.0, 1.0, -1.0),
        ("k1", -100.0, -100.0, 1.0),  # only k3 is clamped
        ("k2", -100.0, 5000.0, -100.0),
        ("k1+", -1.0, -1.0, -1.0),  # the value of k1, the gradient of k2
        ("k3+", -1.0, math.e - 2, -1.0),
    ],
)
def test_kl_by_hand(kind: KlKind, log_prob: float, value: float, gradient: float) -> None:
    log_probs = torch.tensor([log_prob], requires_grad=True)
    estimate, clamped = kl(log_probs, torch.zeros(1), kind)
    close(estimate.detach(), [value])
    close(torch.autograd.grad(estimate.sum(), log_probs)[0], [gradient])
    assert not clamped.any()


@pytest.mark.parametrize("log_prob", [-100.0, -200.0, -3.0, 12.0, 200.0])
def test_clamped_k3_is_10_without_gradient_and_counted(log_prob: float) -> None:
    # e^3 - 3 - 1 = 16.1 and e^-12 + 12 - 1 = 11.0 are above 10 too.
    log_probs = torch.tensor([log_prob], requires_grad=True)
    estimate, clamped = kl(log_probs, torch.zeros(1), "k3")
    (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert estimate.item() == 10.0 and gradient.item() == 0.0 and clamped.item()


@pytest.mark.parametrize("log_prob", [-200.0, 200.0])
def test_straight_through_k3_is_capped_in_value_and_pulls_back_from_any_distance(log_prob: float) -> None:
    log_probs = torch.tensor([log_prob], requires_grad=True)
    estimate, clamped = kl(log_probs, torch.zeros(1), "k3+")
    (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
    assert estimate.item() == 10.0 and gradient.item() == log_prob and clamped.item()


def test_k3_of_a_tiny_difference_does_not_cancel() -> None:
    # d²/2 - d³/6 = 5e-9 at d = 1e-4; e^-d + d - 1 in float32 gives 0 or 6e-8.
    estimate, _ = kl(torch.tensor([1e-4]), torch.zeros(1), "k3")
    assert estimate.item() == pytest.approx(5e-9, abs=6e-12)


def test_entropy_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf], [0.0, math.log(3), -99.0, -99.0]])
    # uniform over 4 and over 2; (1/4, 3/4): 1/4 ln 4 + 3/4 ln 4/3 = 0.562335
    close(entropy(logits), [math.log(4), math.log(2), 0.562335])


def test_entropy_of_a_forbidden_token_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1.0, 0.0, -math.inf]], requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy(logits).sum(), logits)
    assert gradient.isfinite().all() and gradient[0, 2] == 0


@pytest.mark.parametrize(
    ("mode", "denominator_by_hand", "loss"),
    [
        # Rows (1, 2, 3), (5, masked 7), (masked 9): sums 6 and 5, means 2 and 5, third row without a trainable token.
        ("token-mean", 4.0, 11 / 4),
        ("seq-mean-token-sum", 2.0, 11 / 2),
        ("seq-mean-token-mean", 2.0, 7 / 2),
        ("seq-mean-token-sum-norm", 16.0, 11 / 16),  # 2 rows of at most 8 tokens
    ],
)
def test_aggregation_by_hand(mode: Aggregation, denominator_by_hand: float, loss: float) -> None:
    row = torch.tensor([0, 0, 0, 1, 1, 2])
    mask = torch.tensor([True, True, True, True, False, False])
    total = denominator(mask, row, mode, max_tokens=8)
    assert total == denominator_by_hand
    close(aggregate(torch.tensor([1.0, 2.0, 3.0, 5.0, 7.0, 9.0]), row, mask, mode, total), loss)


def in_two_micro_batches(values: list[float], mode: Aggregation, cut: int, row: list[int]) -> float:
    tokens, rows, mask = torch.tensor(values), torch.tensor(row), torch.ones(len(values), dtype=torch.bool)
    total = denominator(mask, rows, mode, max_tokens=1)
    parts = [slice(start, start + cut) for start in range(0, len(values), cut)]
    return sum(aggregate(tokens[part], rows[part], mask[part], mode, total).item() for part in parts)


def test_token_mean_does_not_average_averages() -> None:
    # (6·1 + 2·4) / 8 = 1.75; the mean of the two means would be (1 + 4) / 2 = 2.5.
    assert in_two_micro_batches([1.0] * 6 + [4.0] * 2, "token-mean", 6, [0] * 6 + [1] * 2) == pytest.approx(1.75)


def test_sequence_mean_counts_a_short_last_micro_batch_rightly() -> None:
    # (1 + 1 + 1 + 1 + 6) / 5 = 2; the mean of the means 1, 1, 6 would be 2.67.
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean"):
        assert in_two_micro_batches([1.0, 1.0, 1.0, 1.0, 6.0], mode, 2, [0, 1, 2, 3, 4]) == pytest.approx(2.0)


def test_sequence_mean_weighs_a_long_and_a_short_row_alike() -> None:
    # Rows of 4 and 1 tokens with token losses 1 and 3: (1 + 3) / 2.
    assert in_two_micro_batches([1.0] * 4 + [3.0], "seq-mean-token-mean", 5, [0] * 4 + [1]) == pytest.approx(2.0)


@pytest.mark.parametrize("mode", MODES)
def test_empty_mask_gives_zero_connected_to_the_graph(mode: Aggregation) -> None:
    values = torch.tensor([math.nan, math.inf], requires_grad=True)
    row, mask = torch.tensor([0, 1]), torch.zeros(2, dtype=torch.bool)
    total = denominator(mask, row, mode, max_tokens=8)
    loss = aggregate(values, row, mask, mode, total)
    (gradient,) = torch.autograd.grad(loss, values)
    assert total == 0.0 and loss.item() == 0.0 and gradient.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", MODES)
def test_tool_tokens_have_no_gradient_whatever_they_hold(mode: Aggregation) -> None:
    mask = torch.tensor([True, True, False, False, True])
    row = torch.zeros(5, dtype=torch.int64)
    log_probs = torch.tensor([-1.0, -2.0, -math.inf, math.nan, -3.0], requires_grad=True)
    old = torch.tensor([-1.1, -1.9, math.nan, math.inf, -3.0])
    mine, anchor = within(mask, log_probs), within(mask, old)
    total = denominator(mask, row, mode, max_tokens=8)
    loss = aggregate(clip(mine, anchor, torch.ones(5))[0], row, mask, mode, total)
    loss = loss + aggregate(kl(mine, anchor, "k3")[0], row, mask, mode, total)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    assert loss.isfinite() and gradient.isfinite().all()
    assert gradient[2:4].tolist() == [0.0, 0.0] and (gradient[mask] != 0).all()


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_agrees_with_the_oracle(kind: KlKind) -> None:
    log_probs = oracle("new_log_probs").requires_grad_()
    estimate, clamped = kl(log_probs, oracle("ref_log_probs"), kind)
    expected = ORACLE["kl"][kind]
    close(estimate.detach(), flat(expected["value"]), 1e-5)
    (gradient,) = torch.autograd.grad(estimate[oracle("response_mask")].sum(), log_probs)
    close(gradient, flat(expected["grad_new_of_masked_sum"]), 1e-5)
    assert not clamped.any()


ORACLE_LOSSES = [name.split(" ") for name in ORACLE["policy_loss"] if name != "settings"]


@pytest.mark.parametrize(("name", "mode"), ORACLE_LOSSES)
def test_policy_losses_agree_with_the_oracle(name: str, mode: Aggregation) -> None:
    given = ORACLE["policy_loss"]["settings"]
    given |= dict(zip(("tau_positive", "tau_negative"), given["sapo_tau"], strict=True))
    loss = LOSSES["clip" if name == "vanilla" else name]
    settings = {key: given[key] for key in loss.settings}
    # The oracle aggregates these two in one way whatever it is told; `update.policy` refuses what geo_mean cannot take.
    mode = loss.aggregation if name in ("sapo", "geo_mean") else mode
    row, mask = oracle_rows(), oracle("response_mask")
    columns = {key: oracle(key) for key in ("old_log_probs", "advantages")}
    log_probs = oracle("new_log_probs").requires_grad_()
    token_loss, _ = loss({**columns, "log_probs": log_probs, "mask": mask, "row": row}, settings)
    total = aggregate(token_loss, row, mask, mode, denominator(mask, row, mode, max_tokens=12))
    expected = ORACLE["policy_loss"][f"{name} {mode}"]
    close(total.detach(), expected["loss"], 1e-5)
    close(torch.autograd.grad(total, log_probs)[0], flat(expected["grad_new"]), 1e-5)


@pytest.mark.parametrize("mode", ORACLE["value_loss"])
def test_value_loss_agrees_with_the_oracle(mode: Aggregation) -> None:
    expected = ORACLE["value_loss"][mode]
    row, mask = oracle_rows(), oracle("response_mask")
    values = flat(expected["vpreds"]).requires_grad_()
    token_loss = value_loss(values, oracle("values"), flat(expected["returns"]), expected["clip"])
    loss = aggregate(token_loss, row, mask, mode, denominator(mask, row, mode, max_tokens=12))
    close(loss.detach(), expected["loss"], 1e-5)
    close(torch.autograd.grad(loss, values)[0], flat(expected["grad"]), 1e-5)


@pytest.mark.parametrize(
    ("value", "loss", "gradient"),
    [
        (0.1, 0.405, -0.9),  # within the clip of the old value 0: (0.1 - 1)²/2
        (0.5, 0.32, 0.0),  # towards the return 1, beyond 0.2: (0.2 - 1)²/2, and no further
        (-0.5, 1.125, -1.5),  # away from it: (-0.5 - 1)²/2, and back
        (3.0, 2.0, 2.0),  # past it: the worse of (3 - 1)² and (0.2 - 1)²
    ],
)
def test_value_loss_by_hand(value: float, loss: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    found = value_loss(values, torch.zeros(1), torch.ones(1), clip=0.2)
    close(found.detach(), [loss])
    close(torch.autograd.grad(found.sum(), values)[0], [gradient])


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_agrees_with_the_oracle(mode: Aggregation) -> None:
    row, mask, scale = oracle_rows(), oracle("response_mask"), 16
    name = f"{mode} scale={scale}" if mode == "seq-mean-token-sum-norm" else mode
    loss = aggregate(oracle("matrix"), row, mask, mode, denominator(mask, row, mode, scale))
    close(loss, ORACLE["aggregation"][name], 1e-5)
