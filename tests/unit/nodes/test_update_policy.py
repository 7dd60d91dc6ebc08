"""`update.policy`: one step on the sum of all shares, whatever the micro-batches, the order of rows, or the padding."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from trajectories import trajectories

from flowrl.batch import Batch, Step, Token
from flowrl.join import take
from flowrl.metrics import collect
from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.loss_choice import LOSSES
from flowrl.nodes._backend.minibatch import mini_batches
from flowrl.nodes._backend.trainer import Trainer, trainer_of
from flowrl.nodes.update.policy import Policy
from flowrl.rows import Rows

AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
ALL_TERMS = {"kl_coef": 0.1, "entropy_coef": 0.01}


def columns(batch: Batch, **changes: Any) -> dict[str, Any]:
    return {**batch.columns, "max_tokens": Step(batch.rows, 9)} | changes


def parameters(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.module.parameters()])


def updated(
    context: Context, batch: Batch, sgd: bool = True, changes: dict[str, Any] | None = None, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    """How far a fresh model has moved, and the metrics; under SGD with rate 1 that is the gradient."""
    spec = context.models["policy"]
    if sgd:
        plain = OptimizerSpec(type="torch.optim:SGD", lr=1.0, max_grad_norm=spec.optimizer.max_grad_norm)
        spec = spec.model_copy(update={"optimizer": plain})
    context = replace(context, shared={}, models={"policy": spec})
    node = Policy(**({"minibatch": 4} | settings))
    node.setup(context)
    trainer = trainer_of(context)
    before = parameters(trainer)
    with collect() as report:
        node.run(**columns(batch, **(changes or {})))
    return parameters(trainer) - before, {name: metric.value for name, metric in report.metrics.items()}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_change_neither_gradient_nor_metrics(aggregation: str, context: Context) -> None:
    batch = trajectories()
    whole, metrics = updated(context, batch, aggregation=aggregation, **ALL_TERMS)
    assert whole.abs().max() > 1e-3
    for max_tokens in (1, 30):
        moved, others = updated(
            context, batch, aggregation=aggregation, max_tokens_per_microbatch=max_tokens, **ALL_TERMS
        )
        assert torch.allclose(moved, whole, atol=1e-6 * max(1.0, whole.abs().max().item()))
        assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_is_cut_weighted_and_masked_alike(loss: str, context: Context) -> None:
    """In micro-batches, with weights of 2, and under a narrower mask outside of which columns may hold anything."""
    batch, narrow = trajectories(), masked(trajectories())
    given = {"corrected_mask": narrow, "importance_weights": batch.columns["advantages"] * 0 + 2.0}  # type: ignore[operator]
    whole, metrics = updated(context, batch, changes=given, loss=loss)
    near = 3e-7 + 2e-6 * whole.norm().item()  # the roundoff of a parameter, and of the gradient
    assert whole.norm() > 100 * near
    assert ("actor/clip_fraction" in metrics) == (loss not in ("gpg", "reinforce", "sapo"))
    moved, others = updated(context, batch, changes=given, loss=loss, max_tokens_per_microbatch=1)
    assert torch.allclose(moved, whole, rtol=0, atol=near)
    assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)
    both = {"loss_mask": batch.columns["loss_mask"] & narrow}  # type: ignore[operator]
    plain, alone = updated(context, batch, changes=both, loss=loss)
    assert torch.allclose(whole, 2 * plain, rtol=0, atol=near)
    assert metrics["actor/pg_loss"] == pytest.approx(2 * alone["actor/pg_loss"], rel=1e-5)
    spoiled = {}
    for name in ("advantages", "old_log_probs"):
        column = batch.columns[name]
        values = np.where(both["loss_mask"].values, column.values, -np.inf).astype(np.float32)
        spoiled[name] = Token[float](batch.rows, values, column.offsets)  # type: ignore[attr-defined]
    assert torch.equal(updated(context, batch, changes=both | spoiled, loss=loss)[0], plain)


@pytest.mark.parametrize("sgd", [True, False], ids=["sgd", "adamw"])
def test_the_order_of_rows_changes_nothing(sgd: bool, context: Context) -> None:
    batch = trajectories()
    order = np.random.default_rng(1).permutation(len(batch.rows))
    spec = ModelSpec(path="arith-tiny", trainable=True, optimizer=OptimizerSpec(lr=1e-5))
    context = replace(context, models={"policy": spec})
    settings = {"minibatch": 2, "epochs": 2, "shuffle": True} | ALL_TERMS
    first, metrics = updated(context, batch, sgd, **settings)
    second, others = updated(context, take(batch, order), sgd, **settings)
    assert torch.allclose(first, second, atol=1e-6)
    assert others == pytest.approx(metrics, rel=1e-4, abs=1e-5)


def test_the_loss_is_the_one_of_the_formula(context: Context) -> None:
    batch = trajectories()
    _, metrics = updated(context, batch, kl_coef=0.1, entropy_coef=0.01, dual_clip=3.0)
    model = trainer_of(replace(context, shared={})).module
    at = {name: torch.from_numpy(column.values) for name, column in batch.columns.items()}
    one_row = [np.array([row]) for row in range(len(batch.rows))]
    prompts, responses = batch.columns["prompt_ids"].jagged, batch.columns["response_ids"].jagged  # type: ignore[attr-defined]
    parts = [token_log_probs(model, prompts.take(row), responses.take(row), 0.7, True) for row in one_row]
    log_probs, entropy = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])  # type: ignore[misc]
    ratio, advantages = (log_probs - at["old_log_probs"]).exp(), at["advantages"]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    policy = -torch.where(advantages < 0, torch.maximum(surrogate, 3.0 * advantages), surrogate)
    difference = log_probs - at["ref_log_probs"]
    kl = ((-difference).exp() + difference - 1).clamp(max=10)
    mask = at["loss_mask"]
    assert metrics["actor/pg_loss"] == pytest.approx(policy[mask].mean().item(), rel=1e-5)
    assert metrics["actor/kl_loss"] == pytest.approx(kl[mask].mean().item(), rel=1e-5)
    assert metrics["actor/entropy"] == pytest.approx(entropy[mask].mean().item(), rel=1e-5)
    total = policy[mask].mean() + 0.1 * kl[mask].mean() - 0.01 * entropy[mask].mean()
    assert metrics["actor/loss"] == pytest.approx(total.item(), rel=1e-5)


def test_what_lies_outside_the_mask_reaches_nothing(context: Context) -> None:
    batch = trajectories()
    expected, metrics = updated(context, batch, **ALL_TERMS)
    outside = ~batch.columns["loss_mask"].values
    spoiled = {}
    for name in ("advantages", "old_log_probs", "ref_log_probs"):
        column = batch.columns[name]
        values = column.values.copy()
        values[outside] = np.nan
        spoiled[name] = Token[float](batch.rows, values, column.offsets)  # type: ignore[attr-defined]
    moved, others = updated(context, batch, changes=spoiled, **ALL_TERMS)
    assert torch.equal(moved, expected)
    assert others == metrics


def test_a_gradient_that_is_not_finite_changes_nothing(context: Context) -> None:
    batch = trajectories()
    node = Policy(minibatch=4)
    node.setup(context)
    trainer = trainer_of(context)
    node.run(**columns(batch))
    before = parameters(trainer)
    state = trainer.optimizer.state_dict()["state"][0]
    kept = {key: value.clone() for key, value in state.items()}
    advantages = batch.columns["advantages"]
    values = np.where(batch.columns["loss_mask"].values, np.nan, advantages.values)
    with collect() as report:
        node.run(**columns(batch, advantages=Token(batch.rows, values, advantages.offsets)))  # type: ignore[attr-defined]
    assert torch.equal(parameters(trainer), before)
    assert all(torch.equal(value, kept[key]) for key, value in trainer.optimizer.state_dict()["state"][0].items())
    assert report.metrics["actor/skipped_steps"].value == 1
    assert all(parameter.grad is None for parameter in trainer.module.parameters())
    node.run(**columns(batch))
    assert torch.isfinite(parameters(trainer)).all()
    assert not torch.equal(parameters(trainer), before)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["last", "first"])
def test_a_skipped_step_is_in_no_mean_of_the_others(order: tuple[int, int], context: Context) -> None:
    """Two mini-batches, one with an advantage that is not a number: the metrics are those of the other alone."""
    good = trajectories()
    groups = [np.flatnonzero(good.rows.group < 2), np.flatnonzero(good.rows.group >= 2)]
    alone, expected = updated(context, take(good, groups[order[0]]), minibatch=2, **ALL_TERMS)
    spoiled = good.columns["advantages"].values.copy()
    bad_token = np.isin(good.columns["advantages"].jagged.row, groups[order[1]]) & good.columns["loss_mask"].values  # type: ignore[attr-defined]
    spoiled[np.flatnonzero(bad_token)[0]] = np.nan
    advantages = good.columns["advantages"]._with(spoiled)  # type: ignore[attr-defined]
    moved, metrics = updated(context, good, changes={"advantages": advantages}, minibatch=2, **ALL_TERMS)
    assert torch.allclose(moved, alone, atol=1e-6)
    assert metrics.pop("actor/skipped_steps") == 1
    expected.pop("actor/skipped_steps")
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_an_empty_mask_takes_no_step(context: Context) -> None:
    batch = trajectories()
    mask = batch.columns["loss_mask"]
    nothing = Token(batch.rows, np.zeros_like(mask.values), mask.offsets)  # type: ignore[attr-defined]
    moved, metrics = updated(context, batch, sgd=False, changes={"loss_mask": nothing})
    assert not moved.any()
    assert metrics == {"actor/empty_minibatches": 1}


def test_gradients_above_the_limit_are_scaled_to_it(context: Context) -> None:
    batch = trajectories()
    spec = ModelSpec(path="arith-tiny", trainable=True, optimizer=OptimizerSpec(max_grad_norm=0.01))
    free, metrics = updated(context, batch)
    moved, clipped = updated(replace(context, models={"policy": spec}), batch)
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert (metrics["actor/grad_clipped"], clipped["actor/grad_clipped"]) == (0, 1)
    assert clipped["actor/grad_norm"] == metrics["actor/grad_norm"] == pytest.approx(free.norm().item(), rel=1e-3)


def test_several_steps_need_the_policy_before_the_first(context: Context) -> None:
    batch = trajectories()
    with pytest.raises(ValueError, match="2 optimizer steps in one cycle need old_log_probs"):
        updated(context, batch, minibatch=2, changes={"old_log_probs": None})
    moved, metrics = updated(context, batch, changes={"old_log_probs": None})
    assert moved.any()
    assert metrics["actor/clip_fraction"] == 0


def test_own_log_probs_are_the_anchor_of_a_single_step(context: Context) -> None:
    batch = trajectories()
    without, _ = updated(context, batch, changes={"old_log_probs": None})
    response_ids = batch.columns["response_ids"]
    with torch.no_grad():
        anchor, _ = token_log_probs(
            trainer_of(replace(context, shared={})).module,
            batch.columns["prompt_ids"].jagged,  # type: ignore[attr-defined]
            response_ids.jagged,  # type: ignore[attr-defined]
            0.7,
        )
    given, _ = updated(
        context,
        batch,
        changes={"old_log_probs": Token(batch.rows, anchor.numpy(), response_ids.offsets)},  # type: ignore[attr-defined]
    )
    assert torch.allclose(without, given, atol=1e-6)


def test_the_distance_from_the_engine_is_reported(context: Context) -> None:
    batch = trajectories()
    old = batch.columns["old_log_probs"]
    _, metrics = updated(context, batch, changes={"rollout_log_probs": old - 0.5})  # type: ignore[operator]
    assert metrics["mismatch/log_ratio"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["mismatch/kl"] == pytest.approx(math.exp(0.5) - 1.5, rel=1e-5)


def masked(batch: Batch, seed: int = 1) -> Token[bool]:
    """A mask that leaves out a third of the tokens."""
    mask = batch.columns["loss_mask"]
    drawn = np.random.default_rng(seed).random(len(mask.values)) < 0.67
    return Token(batch.rows, drawn, mask.offsets)  # type: ignore[attr-defined]


def test_importance_weights_multiply_the_policy_loss_after_the_clip_and_nothing_else(context: Context) -> None:
    batch = trajectories()
    advantages = batch.columns["advantages"]
    plain, metrics = updated(context, batch)
    twice, doubled = updated(context, batch, changes={"importance_weights": advantages * 0 + 2.0})  # type: ignore[operator]
    assert torch.allclose(twice, 2 * plain, atol=1e-6)
    assert doubled["actor/pg_loss"] == pytest.approx(2 * metrics["actor/pg_loss"], rel=1e-5)
    assert doubled["actor/clip_fraction"] == metrics["actor/clip_fraction"] > 0
    drawn = np.random.default_rng(0).uniform(0.1, 2.0, len(advantages.values)).astype(np.float32)
    weights = Token[float](batch.rows, drawn, advantages.offsets)  # type: ignore[attr-defined]
    # A clipped surrogate is linear in the advantage, whose sign a weight does not change.
    weighted, _ = updated(context, batch, changes={"importance_weights": weights})
    scaled, _ = updated(context, batch, changes={"advantages": advantages * weights})  # type: ignore[operator]
    assert torch.allclose(weighted, scaled, atol=1e-6)
    in_parts, _ = updated(context, batch, changes={"importance_weights": weights}, max_tokens_per_microbatch=30)
    assert torch.allclose(in_parts, weighted, atol=1e-6)
    terms = {"kl_coef": 0.1, "entropy_coef": 0.01}
    off = {"importance_weights": advantages * 0}  # type: ignore[operator]
    _, only_others = updated(context, batch, changes=off, **terms)
    assert only_others["actor/pg_loss"] == 0
    assert only_others["actor/kl_loss"] == updated(context, batch, **terms)[1]["actor/kl_loss"]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_corrected_mask_narrows_every_term_and_every_denominator(aggregation: str, context: Context) -> None:
    batch, more = trajectories(), {"aggregation": aggregation} | ALL_TERMS
    narrow = masked(batch)
    both = batch.columns["loss_mask"] & narrow  # type: ignore[operator]
    expected, metrics = updated(context, batch, changes={"loss_mask": both}, **more)
    moved, others = updated(context, batch, changes={"corrected_mask": narrow}, **more)
    assert torch.equal(moved, expected)
    assert others == metrics
    outside = np.where(narrow.values, 1.0, np.nan).astype(np.float32)
    spoiled = {"corrected_mask": narrow, "importance_weights": Token(batch.rows, outside, narrow.offsets)}
    assert torch.equal(updated(context, batch, changes=spoiled, **more)[0], expected)


def test_versions_of_trained_tokens_are_reported_once_whatever_the_epochs(context: Context) -> None:
    batch = trajectories(num_groups=3, group_size=1)
    rows = batch.rows
    lengths = batch.columns["response_ids"].lengths  # type: ignore[attr-defined]
    versions = [[3] * int(lengths[0]), [1, *[4] * (int(lengths[1]) - 1)], [5] * int(lengths[2])]
    mask = Token.of(rows, [[True] * int(n) for n in lengths[:2]] + [[False] * int(lengths[2])], "bool")
    assert lengths[1] > 1
    changes = {"policy_version": Token.of(rows, versions, "int"), "loss_mask": mask}
    _, metrics = updated(context, batch, minibatch=2, epochs=2, changes=changes)
    trained = versions[0] + versions[1]
    assert metrics["actor/policy_version/mean"] == pytest.approx(sum(trained) / len(trained))
    assert metrics["actor/policy_version/min"] == 1
    assert metrics["staleness/spans"] == 1.5
    _, metrics = updated(context, batch, minibatch=2, epochs=2, changes={**changes, "corrected_mask": ~mask})
    assert "actor/policy_version/mean" not in metrics


def test_settings_say_what_is_read() -> None:
    assert Policy(minibatch=1).needs() == {"ref_log_probs": False, "max_tokens": False}
    node = Policy(minibatch=1, kl_coef=0.1, aggregation="seq-mean-token-sum-norm")
    assert node.needs() == {"ref_log_probs": True, "max_tokens": True}


def test_mini_batches_are_cut_by_identity_in_any_order_of_arrival() -> None:
    rows = Rows.of("ccaabbdd")
    other = rows.take(np.array([7, 0, 3, 4, 2, 5, 6, 1]))
    for seed in (None, "0/0", "0/1", "1/0"):
        names = [[rows.names()[i] for i in part] for part in mini_batches(rows, 2, seed)]
        assert names == [[other.names()[i] for i in part] for part in mini_batches(other, 2, seed)]
        assert sorted(name for part in names for name in part) == sorted(rows.names())
        assert [len(part) for part in names] == [4, 4]
    plain = [[rows.names()[i] for i in part] for part in mini_batches(rows, 2)]
    assert plain[0] == ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    cuts = {str([sorted(rows.group[part].tolist()) for part in mini_batches(rows, 2, f"0/{e}")]) for e in range(20)}
    assert len(cuts) > 3


def test_too_many_steps_without_a_finite_gradient_end_the_run_and_change_nothing(context: Context) -> None:
    batch = trajectories()
    advantages = batch.columns["advantages"]
    broken = advantages._with(np.full_like(advantages.values, np.inf))
    node = Policy(minibatch=batch.rows.num_groups, max_skipped=2)
    node.setup(context)
    columns = {name: batch.columns[name] for name in node.input_ports if name in batch.columns} | {"advantages": broken}
    before = [parameter.clone() for parameter in trainer_of(context).module.parameters()]
    node.run(**columns)  # type: ignore[arg-type]
    assert not node.changed()
    with pytest.raises(FloatingPointError, match="2 optimizer steps in a row"):
        node.run(**columns)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer_of(context).module.parameters(), strict=True))
