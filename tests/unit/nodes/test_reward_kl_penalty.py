"""`reward.kl_penalty` against numbers worked by hand; its estimators against those of the loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flowrl.batch import Sample, Token
from flowrl.metrics import collect
from flowrl.node import Context
from flowrl.nodes._backend.divergence import Estimator, estimate
from flowrl.nodes._backend.losses import kl
from flowrl.nodes.reward.kl_penalty import KlPenalty
from flowrl.rows import Rows

OLD, REF = [[-1.0, -2.0, -0.5], [-1.0]], [[-1.5, -1.0, -9.0], [-0.5]]
MASK = [[True, True, False], [True]]


def made(**settings: Any) -> KlPenalty:
    node = KlPenalty(**settings)
    node.setup(Context(node="penalty"))
    return node


def penalised(node: KlPenalty, rewards: list[float], **more: Any) -> tuple[KlPenalty.Out, dict[str, float]]:
    rows = Rows.of([f"u{number}" for number in range(len(rewards))])
    columns = {"old_log_probs": more.get("old", OLD), "ref_log_probs": more.get("ref", REF)}
    with collect() as report:
        out = node.run(
            reward=Sample(rows, np.array(rewards)),
            response_mask=Token.of(rows, more.get("mask", MASK), "bool"),
            **{name: Token.of(rows, values, "float") for name, values in columns.items()},
        )
    return out, {name: part.value for name, part in report.metrics.items()}


def test_tokens_pay_for_their_divergence_and_the_last_trained_one_has_the_reward() -> None:
    out, metrics = penalised(made(coef=0.1), [1.0, 0.5])
    assert out.shaped_reward.values.tolist() == pytest.approx([1.0 - 0.1 * (0.5 - 1.0), 0.5 - 0.1 * -0.5])
    assert out.token_rewards.values.tolist() == pytest.approx([-0.05, 0.1 + 1.0, 0.0, 0.5 + 0.05])
    assert metrics == {"reward/kl": pytest.approx((0.5 - 1.0 - 0.5) / 3), "reward/kl_coef": 0.1}


def test_what_tokens_get_is_what_the_response_gets() -> None:
    out, _ = penalised(made(coef=0.3, kl="k3"), [1.0, 0.5])
    sums = np.bincount(out.token_rewards.jagged.row, out.token_rewards.values)
    assert sums == pytest.approx(out.shaped_reward.values, abs=1e-6)


def test_an_unscored_response_stays_unscored_and_one_without_tokens_keeps_its_reward() -> None:
    out, _ = penalised(made(), [math.nan, 2.0], mask=[[True, True, True], [False]])
    assert math.isnan(out.shaped_reward.values[0])
    assert np.isfinite(out.token_rewards.values).all()
    assert out.shaped_reward.values[1] == 2.0


def test_a_session_of_several_outputs_is_rewarded_once_and_pays_for_all_of_them() -> None:
    rows = Rows(["u0"], [0, 0, 0], [0, 1, 0], [1, 0, 0])
    out = made(coef=0.1).run(
        reward=Sample(rows, [1.0, 0.5, math.nan]),  # the last outputs are the first two rows
        response_mask=Token.of(rows, [[True, True], [True], [True]], "bool"),
        old_log_probs=Token.of(rows, [[-1.0, -1.0], [-2.0], [-3.0]], "float"),
        ref_log_probs=Token.of(rows, [[-2.0, -2.0], [-3.0], [-5.0]], "float"),
    )
    assert out.shaped_reward.values.tolist() == pytest.approx([1.0 - 0.4, 0.5 - 0.1, 1.0 - 0.4])
    assert out.token_rewards.values.tolist() == pytest.approx([-0.1, 1.0 - 0.1, 0.5 - 0.1, 1.0 - 0.2])


def test_outside_the_mask_anything_may_stand_and_inside_it_is_named() -> None:
    out, _ = penalised(made(), [1.0, 1.0], ref=[[-1.5, -1.0, -math.inf], [-0.5]])
    assert np.isfinite(out.token_rewards.values).all()
    with pytest.raises(ValueError, match=r"ref_log_probs of u1_0_0 has a value that is not finite"):
        penalised(made(), [1.0, 1.0], ref=[[-1.5, -1.0, 0.0], [-math.inf]])


@given(st.lists(st.floats(-300, 300), min_size=1), st.sampled_from(["k1", "k2", "k3", "abs"]))
def test_the_estimators_are_those_of_the_loss(differences: list[float], kind: Estimator) -> None:
    values = torch.tensor(differences, dtype=torch.float64)
    expected, _ = kl(values, torch.zeros_like(values), kind)
    assert estimate(np.array(differences), kind) == pytest.approx(expected.numpy(), rel=1e-12)


@pytest.mark.parametrize(("target", "factor"), [(100.0, 1 - 0.2 * 2 / 100), (0.01, 1 + 0.2 * 2 / 100)])
def test_the_coefficient_rises_while_the_divergence_is_above_its_target(target: float, factor: float) -> None:
    node = made(coef=0.1, kl="abs", target=target, horizon=100)
    coefficients = [penalised(node, [1.0, 1.0])[1]["reward/kl_coef"] for _ in range(3)]
    assert coefficients == pytest.approx([0.1, 0.1 * factor, 0.1 * factor**2])


def test_near_the_target_it_answers_in_proportion() -> None:
    node = made(coef=0.1, kl="abs", target=0.95, horizon=10)
    penalised(node, [1.0, 1.0])  # 1.5 and 0.5 nats: on average 1.0
    assert node.state() == {"coef": pytest.approx(0.1 * (1 + (1 / 0.95 - 1) * 2 / 10))}


def test_it_never_reaches_zero() -> None:
    node = made(coef=0.1, target=5.0, horizon=1)
    for _ in range(50):
        penalised(node, [1.0, 1.0])
    assert node.state()["coef"] > 0


def test_a_coefficient_that_adapts_goes_on_from_a_checkpoint_and_a_fixed_one_is_the_documents() -> None:
    node = made(coef=0.1, target=100.0, horizon=10)
    penalised(node, [1.0, 1.0])
    again, fixed = made(coef=0.1, target=100.0, horizon=10), made(coef=0.3)
    again.load_state(node.state())
    fixed.load_state(node.state())
    assert again.state() == node.state() != {"coef": 0.1}
    assert fixed.state() == {"coef": 0.3}


def test_a_horizon_without_a_target_is_refused() -> None:
    with pytest.raises(ValidationError, match="horizon has no effect without target"):
        KlPenalty(horizon=5)
