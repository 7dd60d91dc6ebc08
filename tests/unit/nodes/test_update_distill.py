"""`update.distill`: the divergence from a teacher over all words, against the plain formula, however it is cut."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor
from trajectories import trajectories

from flowrl.batch import Batch
from flowrl.join import take
from flowrl.metrics import collect, merge
from flowrl.model import LoraSpec, ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes._backend.distilling import Teacher, reverse_kl, token_divergences
from flowrl.nodes._backend.models import load_model
from flowrl.nodes._backend.trainer import trainer_of
from flowrl.nodes.update.distill import Distill
from flowrl.nodes.update.policy import Policy

SGD = OptimizerSpec(type="torch.optim:SGD", lr=1.0, max_grad_norm=math.inf)
STUDENT = ModelSpec(path="arith-tiny", trainable=True, optimizer=SGD)
IDS = ("prompt_ids", "response_ids", "loss_mask", "temperature")


@pytest.fixture(scope="module")
def models(model_folder: Callable[[str], Path]) -> dict[str, ModelSpec]:
    """The shipped model, and a teacher of another architecture."""
    return {"policy": STUDENT, "teacher": ModelSpec(path=str(model_folder("qwen2")))}


def plain_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """The formula, of logits (T, V)."""
    p, q = torch.softmax(student, -1), torch.softmax(teacher, -1)
    return torch.special.xlogy(p, p / q).sum(-1)


@given(
    num_tokens=st.integers(1, 9),
    num_words=st.integers(2, 30),
    spread=st.sampled_from([0.1, 3.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_the_divergence_is_that_of_the_formula_and_rises_with_the_words_that_are_told_apart(
    num_tokens: int, num_words: int, spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    student = (torch.randn(num_tokens, num_words, dtype=torch.float64) * spread).requires_grad_()
    teacher = torch.randn(num_tokens, num_words, dtype=torch.float64) * spread
    log_probs = [torch.log_softmax(each, -1) for each in (student, teacher)]
    expected, pull = plain_kl(student, teacher), torch.randn(num_tokens, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * pull).sum(), student, retain_graph=True)[0]
    for top_k in (None, num_words - 1, num_words, 10 * num_words):
        found = reverse_kl(*log_probs, top_k)  # type: ignore[arg-type]
        gradient = torch.autograd.grad((found * pull).sum(), student, retain_graph=True)[0]
        assert torch.allclose(found, expected, atol=1e-10)
        assert torch.allclose(gradient, wanted, atol=1e-10)
    bounds = torch.stack([reverse_kl(*log_probs, k).detach() for k in range(1, num_words)])  # type: ignore[arg-type]
    assert (bounds.diff(dim=0) > -1e-10).all()
    assert (bounds >= -1e-10).all()
    assert (bounds <= expected.detach() + 1e-10).all()


def test_impossible_words_have_a_finite_divergence_and_gradient() -> None:
    inf = math.inf
    student = torch.tensor([[0.0, -inf, 1.0, 200.0], [-200.0, 200.0, -inf, -inf]], requires_grad=True)
    teacher = torch.tensor([[-inf, 0.0, 1.0, -200.0], [200.0, -inf, 0.0, -inf]])
    for top_k in (None, 1, 2):
        found = reverse_kl(torch.log_softmax(student, -1), torch.log_softmax(teacher, -1), top_k)
        assert torch.isfinite(found).all()
        assert torch.isfinite(torch.autograd.grad(found.sum(), student)[0]).all()


def every_row(model: Any, batch: Batch, temperature: float = 0.7) -> Tensor:
    """Logits (T, V) at each response token, row by row, without padding."""
    found = []
    pairs = zip(batch.columns["prompt_ids"].jagged, batch.columns["response_ids"].jagged, strict=True)  # type: ignore[attr-defined]
    for prompt, response in pairs:
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        found.append(model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature)
    return torch.cat(found)


def distilled(models: dict[str, ModelSpec], columns: dict[str, Any], node: Any) -> tuple[Tensor, dict[str, float]]:
    """How far a fresh model has moved, which is its gradient, and the metrics.

    In float64: float32 alone moves gradients of 1 by 2e-5, with logits of these sizes.
    """
    node.setup(context := Context(models=models, model="policy"))
    trainer = trainer_of(context)
    trainer.module.double()
    if isinstance(node, Distill):
        node._teacher.model.double()
    before = torch.cat([parameter.detach().flatten() for parameter in trainer.module.parameters()])
    with collect() as report:
        node.run(**columns)
    after = torch.cat([parameter.detach().flatten() for parameter in trainer.module.parameters()])
    return before - after, {name: metric.value for name, metric in report.metrics.items()}


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_the_step_is_that_of_the_plain_formula(
    top_k: int | None, aggregation: str, models: dict[str, ModelSpec]
) -> None:
    batch = trajectories()
    columns = {name: batch.columns[name] for name in IDS}
    node = Distill(minibatch=4, aggregation=aggregation, top_k=top_k, distill_coef=0.5)  # type: ignore[arg-type]
    moved, metrics = distilled(models, columns, node)
    student = load_model(models["policy"]).double()
    with torch.no_grad():
        teacher = torch.log_softmax(every_row(load_model(models["teacher"]).double(), batch), -1)
    log_probs = torch.log_softmax(every_row(student, batch), -1)
    if top_k is not None:
        chosen = log_probs.topk(top_k).indices
        both = [torch.cat([each.gather(1, chosen), (1 - each.exp().gather(1, chosen).sum(1)).log()[:, None]], 1)
                for each in (log_probs, teacher)]  # fmt: skip
    else:
        both = [log_probs, teacher]
    divergence = (both[0].exp() * (both[0] - both[1])).sum(1)
    mask = torch.from_numpy(batch.columns["loss_mask"].values)
    row = torch.from_numpy(batch.columns["loss_mask"].jagged.row)[mask]  # type: ignore[attr-defined]
    weight = 1 / torch.bincount(row)[row] / len(row.unique()) if "seq" in aggregation else torch.tensor(1 / len(row))
    loss = 0.5 * (divergence[mask] * weight).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = torch.cat([parameter.grad.flatten() for parameter in student.parameters()])  # type: ignore[union-attr]
    assert gradient.abs().max() > 1e-2
    assert (moved - gradient).abs().max() < 1e-6 * max(1.0, gradient.abs().max().item())
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["actor/pg_loss"] == 0
    assert metrics["distill/reverse_kl"] == pytest.approx(divergence[mask].mean().item(), rel=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 30])
def test_neither_micro_batches_nor_order_nor_what_lies_outside_the_mask_change_the_step(
    max_tokens: int, models: dict[str, ModelSpec]
) -> None:
    batch = trajectories()
    settings: dict[str, Any] = {"minibatch": 4, "top_k": 5, "entropy_coef": 0.01, "kl_coef": 0.1}
    whole, metrics = distilled(models, batch.columns, Distill(**settings))
    order = np.random.default_rng(1).permutation(len(batch.rows))
    columns = dict(take(batch, order).columns)
    outside = ~columns["loss_mask"].values
    for name in ("advantages", "ref_log_probs"):
        columns[name] = columns[name]._with(np.where(outside, np.nan, columns[name].values))  # type: ignore[attr-defined]
    moved, others = distilled(models, columns, Distill(**settings, max_tokens_per_microbatch=max_tokens))
    assert torch.allclose(moved, whole, atol=1e-6 * max(1.0, whole.abs().max().item()))
    assert others == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_with_advantages_it_is_the_policy_update_and_the_divergence(models: dict[str, ModelSpec]) -> None:
    batch = trajectories()
    alone, _ = distilled(models, {name: batch.columns[name] for name in IDS}, Distill(minibatch=4))
    policy, metrics = distilled(models, batch.columns, Policy(minibatch=4, kl_coef=0.1))
    both, others = distilled(models, batch.columns, Distill(minibatch=4, kl_coef=0.1, distill_coef=0.3))
    assert torch.allclose(both, policy + 0.3 * alone, atol=1e-5)
    for name in ("pg_loss", "kl_loss", "entropy", "clip_fraction"):
        assert others[f"actor/{name}"] == pytest.approx(metrics[f"actor/{name}"], rel=1e-5)
    assert others["actor/loss"] == pytest.approx(metrics["actor/loss"] + 0.3 * others["distill/reverse_kl"], rel=1e-5)


def test_a_teacher_that_is_the_policy_itself_moves_nothing(models: dict[str, ModelSpec]) -> None:
    batch = trajectories()
    same = {"policy": STUDENT, "teacher": ModelSpec(path="arith-tiny")}
    moved, metrics = distilled(same, {name: batch.columns[name] for name in IDS}, Distill(minibatch=4))
    assert metrics["distill/reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert moved.abs().max() < 1e-5


def test_a_surer_teacher_is_the_same_model_at_a_lower_temperature(models: dict[str, ModelSpec]) -> None:
    batch = trajectories()
    found = []
    for temperature in (None, 0.7, 0.2):
        node = Distill(minibatch=4, teacher_temperature=temperature)
        found.append(distilled(models, {name: batch.columns[name] for name in IDS}, node)[1]["distill/reverse_kl"])
    with torch.no_grad():
        logits = [every_row(load_model(models[name]).double(), batch, 1.0) for name in ("policy", "teacher")]
    mask = batch.columns["loss_mask"].values
    expected = plain_kl(logits[0] / 0.7, logits[1] / 0.2)[torch.from_numpy(mask)].mean().item()
    assert found[0] == found[1]
    assert found[2] == pytest.approx(expected, rel=1e-5)


def test_the_base_of_adapters_may_be_their_teacher() -> None:
    """It takes no memory of its own; adapters on the output projection are not those of the teacher."""
    lora = LoraSpec(rank=4, target_modules=["q_proj", "lm_head"])
    spec = ModelSpec(path="arith-tiny", trainable=True, optimizer=SGD, lora=lora)
    context = Context(models={"policy": spec, "base": ModelSpec(path="arith-tiny")}, model="policy", trained={"policy"})
    batch = trajectories()
    node = Distill(minibatch=4, teacher="base")
    node.setup(context)
    module = trainer_of(context).module
    teacher = Teacher(replace(context, model="base"))
    assert teacher.model is module
    torch.manual_seed(0)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    prompts, responses = (batch.columns[name].jagged for name in IDS[:2])  # type: ignore[attr-defined]
    found = token_divergences(module, teacher, prompts, responses, 0.7)[2].detach()
    with torch.no_grad():
        base = every_row(load_model(context.models["base"]), batch)
        expected = plain_kl(every_row(module, batch), base)
    assert expected.max() > 0.1
    assert torch.allclose(found, expected, atol=1e-5)


def test_words_that_one_model_lacks_do_not_count(models: dict[str, ModelSpec], tmp_path: Path) -> None:
    """Vocabularies are padded to different sizes: the distributions are of the words that both know."""
    from transformers import Qwen2ForCausalLM

    wide = Qwen2ForCausalLM.from_pretrained(models["teacher"].path)
    wide.resize_token_embeddings(23, mean_resizing=False)
    wide.save_pretrained(tmp_path)
    batch = trajectories()
    columns = {name: batch.columns[name] for name in IDS}
    expected, metrics = distilled(models, columns, Distill(minibatch=4))
    wider = {**models, "teacher": ModelSpec(path=str(tmp_path))}
    moved, others = distilled(wider, columns, Distill(minibatch=4))
    assert torch.allclose(moved, expected, atol=1e-6 * max(1.0, expected.abs().max().item()))
    assert others == pytest.approx(metrics, rel=1e-5)


def ranked(rank: int, num_ranks: int, models: dict[str, ModelSpec]) -> dict[str, Any]:
    from flowrl.nodes._backend.weights import _whole, named_weights

    batch = take(trajectories(num_groups=3), np.array([0, 1, 2, 3, 4, 5, 8]))
    context = Context("update", "policy", models, rank, num_ranks)
    node = Distill(minibatch=2, max_tokens_per_microbatch=25, top_k=4)
    node.setup(context)
    with collect() as report:
        node.run(**batch.columns)  # type: ignore[arg-type]
    weights = named_weights(trainer_of(context).module).items()
    return {
        "weights": {name: _whole(weight.detach()).numpy().copy() for name, weight in weights},
        "metrics": list(report.metrics.values()),
    }


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(("student", "teacher"), [("ddp", "ddp"), ("ddp", "fsdp2"), ("fsdp2", "fsdp2")])
def test_ranks_change_nothing_copied_or_sharded(
    student: Any, teacher: Any, two: Ranks, models: dict[str, ModelSpec]
) -> None:
    slow = SGD.model_copy(update={"lr": 0.01})
    specs = {
        "policy": models["policy"].model_copy(update={"parallel": student, "optimizer": slow}),
        "teacher": models["teacher"].model_copy(update={"parallel": teacher}),
    }
    expected, found = ranked(0, 1, specs), two.run(ranked, specs)
    for rank in found:
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weight, rtol=0, atol=1e-6, err_msg=name)
    wanted = {name: metric.value for name, metric in merge([expected["metrics"]]).items()}
    merged = {name: metric.value for name, metric in merge(rank["metrics"] for rank in found).items()}
    assert merged == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_settings_of_the_policy_loss_without_advantages_are_refused() -> None:
    reads: dict[str, tuple[str, ...]] = {"loss_mask": ("loss_mask",)}
    assert Distill(minibatch=1).refuses(reads, 8, 2) == ""
    assert "clip_high is of the policy loss" in Distill(minibatch=8, clip_high=0.3).refuses(reads, 8)
    weighed = reads | {"importance_weights": ("importance_weights",)}
    assert "leave them out; how old samples may be is uncorrected_staleness" in Distill(minibatch=8).refuses(weighed, 8)
    anchored = reads | {"advantages": ("advantages",)}
    assert Distill(minibatch=8, clip_high=0.3).refuses(anchored, 8) == ""
    assert "old_log_probs" in Distill(minibatch=1).refuses(anchored, 8)
