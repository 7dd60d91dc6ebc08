"""Policy losses against numbers worked by hand; the oracle's are in test_losses.py."""

import math
from typing import Any, get_args

import pytest
import torch

from flowrl.nodes._backend import policy_losses
from flowrl.nodes._backend.loss_choice import LOSSES
from flowrl.nodes.update.policy import Policy


def losses_of(
    name: str, ratios: list[float], advantages: list[float], rows: list[int] | None = None, **more: Any
) -> tuple[list[float], list[float], list[bool] | None]:
    """Losses of tokens, the gradients of their sum by the log-probabilities, and where a clip decided.

    Log-probabilities are those of the ratios: the anchor's are 0.
    """
    log_probs = torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()
    columns = {
        "log_probs": log_probs,
        "old_log_probs": torch.zeros_like(log_probs),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "mask": torch.ones(len(ratios), dtype=torch.bool),
        "row": torch.tensor(rows or [0] * len(ratios)),
    }
    weights = more.pop("importance_weights", None)
    given = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    loss, clipped = LOSSES[name](columns, more, given)
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    return loss.tolist(), gradient.tolist(), None if clipped is None else clipped.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),  # -min(1·2, 1·2); gradient -rA
        (1.1, 2.0, -2.2, -2.2, False),  # inside 0.8 to 1.2
        (1.5, 2.0, -2.4, 0.0, True),  # -min(1.5·2, 1.2·2) = -2.4
        (0.5, 2.0, -1.0, -1.0, False),  # -min(0.5·2, 0.8·2) = -1: a ratio that must rise is not clipped
        (0.5, -2.0, 1.6, 0.0, True),  # -min(0.5·-2, 0.8·-2) = 1.6
        (1.5, -2.0, 3.0, 3.0, False),  # -min(1.5·-2, 1.2·-2) = 3, below 3·2
        (4.0, -2.0, 6.0, 0.0, True),  # -min(4·-2, 1.2·-2) = 8, dual clip: at most 3·2 = 6
        (4.0, 0.0, 0.0, 0.0, False),  # no signal
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, loss: float, gradient: float, clipped: bool) -> None:
    found = losses_of("clip", [ratio], [advantage])
    assert found == (pytest.approx([loss]), pytest.approx([gradient]), [clipped])


def test_clip_takes_its_settings() -> None:
    assert losses_of("clip", [1.5], [2.0], clip_high=0.4)[0] == pytest.approx([-2.8])  # -1.4·2
    assert losses_of("clip", [0.5], [-2.0], clip_low=0.4)[0] == pytest.approx([1.2])  # 0.6·2
    assert losses_of("clip", [9.0], [-2.0], dual_clip=5.0)[0] == pytest.approx([10.0])  # 5·2


def test_gspo_clips_the_geometric_mean_of_a_trajectory() -> None:
    # Of 4 and 1 it is 2, of 0.25 and 4 it is 1; the gradient of a token is -sA, that of a clipped trajectory 0.
    loss, gradient, clipped = losses_of("gspo", [4.0, 1.0, 0.25, 4.0], [1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1])
    assert loss == pytest.approx([-1.0004, -1.0004, -3.0, -3.0])
    assert gradient == pytest.approx([0.0, 0.0, -3.0, -3.0])
    assert clipped == [True, True, False, False]
    loss, gradient, _ = losses_of("gspo", [4.0, 1.0], [-1.0, -1.0], clip_high=0.5)
    assert (loss, gradient) == (pytest.approx([2.0, 2.0]), pytest.approx([2.0, 2.0]))  # no dual clip


def test_cispo_caps_the_weight_and_leaves_no_token_out() -> None:
    loss, gradient, clipped = losses_of("cispo", [8.0, 0.5], [2.0, -2.0])
    assert loss == pytest.approx([-5 * 2 * math.log(8), 0.5 * 2 * math.log(0.5)])
    assert gradient == pytest.approx([-10.0, 1.0])
    assert clipped == [True, False]
    assert losses_of("cispo", [8.0, 0.5], [2.0, -2.0], clip_low=0.2, clip_high=0.2)[1] == pytest.approx([-2.4, 1.6])


def test_gpg_knows_no_ratio_and_reinforce_no_clip() -> None:
    assert losses_of("gpg", [8.0], [2.0]) == (pytest.approx([-2 * math.log(8)]), [-2.0], None)
    assert losses_of("reinforce", [8.0], [2.0]) == (pytest.approx([-16.0]), pytest.approx([-16.0]), None)
    assert losses_of("reinforce", [1.0], [2.0])[1] == losses_of("gpg", [1.0], [2.0])[1]


def test_sapo_fades_out_on_both_sides() -> None:
    # At r = 1 the gate is 4/tau · 1/2 and its slope 1: the gradient is -A, whatever tau.
    assert losses_of("sapo", [1.0], [2.0]) == (pytest.approx([-4.0]), pytest.approx([-2.0]), None)
    assert losses_of("sapo", [1.0], [-2.0]) == (pytest.approx([4 / 1.05]), pytest.approx([2.0]), None)

    # -r · 4 sigmoid'(r - 1) A
    def slope(x: float) -> float:
        return 4 / (1 + math.exp(-x)) / (1 + math.exp(x))

    assert losses_of("sapo", [3.0], [2.0])[1] == pytest.approx([-3 * slope(2.0) * 2])
    assert losses_of("sapo", [3.0], [-2.0], tau_negative=2.0)[1] == pytest.approx([3 * slope(4.0) * 2])
    assert losses_of("sapo", [3.0], [2.0], tau_positive=2.0)[1] == pytest.approx([-3 * slope(4.0) * 2])


def test_geo_mean_clips_logarithms_and_has_one_value_for_a_trajectory() -> None:
    # e^2 is clipped to e^0.4 for A > 0, 1/e is not: the mean of 0.4 and -1 is -0.3.
    loss, gradient, clipped = losses_of("geo_mean", [math.e**2, 1 / math.e], [1.0, 1.0])
    value = math.exp(-0.3)
    assert loss == pytest.approx([-value, -value])
    assert gradient == pytest.approx([0.0, -value])  # of the sum of two equal values, by one of two logarithms
    assert clipped == [True, False]
    # For A < 0 it is 1/e that is clipped, to e^-0.4: the mean of 2 and -0.4 is 0.8. A is the mean of both.
    loss, gradient, clipped = losses_of("geo_mean", [math.e**2, 1 / math.e], [-1.0, -3.0])
    assert loss == pytest.approx([2 * math.exp(0.8)] * 2)
    assert gradient == pytest.approx([2 * math.exp(0.8), 0.0])
    assert clipped == [False, True]
    assert losses_of("geo_mean", [math.e], [1.0], clip_high=0.1)[0] == pytest.approx([-math.exp(0.1)])
    assert losses_of("geo_mean", [1 / math.e], [-1.0], clip_low=0.1)[0] == pytest.approx([math.exp(-0.1)])


def test_importance_weights_multiply_after_clipping() -> None:
    # The clipped loss is -1.2·2 = -2.4, halved -1.2; halving the ratio first would give -0.75·2 = -1.5.
    assert losses_of("clip", [1.5], [2.0], importance_weights=[0.5])[0] == pytest.approx([-1.2])
    assert losses_of("gspo", [1.0, 1.0], [2.0, 2.0], importance_weights=[0.5, 2.0])[0] == pytest.approx([-1.0, -4.0])


def test_a_trajectory_with_one_value_has_the_geometric_mean_of_its_weights() -> None:
    weighted = losses_of("geo_mean", [1.0, 1.0], [2.0, 2.0], importance_weights=[0.5, 8.0])
    assert weighted[:2] == (pytest.approx([-4.0, -4.0]), pytest.approx([-4.0, -4.0]))  # sqrt(0.5·8) = 2
    none = losses_of("geo_mean", [1.0, 1.0], [2.0, 2.0], importance_weights=[0.0, 1.0])
    assert none[:2] == ([0.0, 0.0], [0.0, 0.0])


@pytest.mark.parametrize("name", LOSSES)
def test_every_setting_of_a_loss_changes_it_and_is_a_key_of_the_node(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ratios = (torch.randn(40, generator=generator) * 2).exp().tolist()
    advantages = torch.randn(8, generator=generator).repeat_interleave(5).tolist()
    rows = [row for row in range(8) for _ in range(5)]
    default = losses_of(name, ratios, advantages, rows)
    for key, value in LOSSES[name].settings.items():
        assert losses_of(name, ratios, advantages, rows, **{key: value * 0.8})[0] != default[0], key
        assert key in Policy.model_fields
        assert f"{value:g}" in str(Policy.model_fields[key].description).replace("3e-4", "0.0003").replace(
            "4e-4", "0.0004"
        )


def test_the_node_offers_the_losses_that_there_are() -> None:
    choices, _ = get_args(Policy.model_fields["loss"].annotation)
    assert set(get_args(choices)) == LOSSES.keys()
    assert all(getattr(policy_losses, name) is loss.function for name, loss in LOSSES.items())
