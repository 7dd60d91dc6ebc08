"""However a mini-batch is split over ranks and micro-batches, ordered and masked, its step is the same."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from trajectories import trajectories

from flowrl.batch import Batch, Step
from flowrl.join import take
from flowrl.metrics import collect, merge
from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.node import Context

SGD = {limit: OptimizerSpec(type="torch.optim:SGD", lr=0.01, max_grad_norm=limit) for limit in (0.5, math.inf)}
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KINDS = ["k1", "k2", "k3", "abs"]
WIDE = 10**6
"""Tokens of a micro-batch that holds everything."""


@dataclass
class Case:
    """One update of a model."""

    spec: ModelSpec
    batch: Batch
    node: dict[str, Any] = field(default_factory=dict)


def updated(rank: int, num_ranks: int, case: Case) -> dict[str, Any]:
    """What is left of a fresh model, whole, and what was reported."""
    from flowrl.nodes._backend.trainer import trainer_of
    from flowrl.nodes._backend.weights import _whole, named_weights
    from flowrl.nodes.update.policy import Policy

    steps = {"policy": 12}
    context = Context("update", "policy", {"policy": case.spec}, rank, num_ranks, optimizer_steps=steps)
    node = Policy(**{"minibatch": 100, "max_tokens_per_microbatch": WIDE} | case.node)
    node.setup(context)
    trainer = trainer_of(context)
    with collect() as report:
        node.run(**case.batch.columns, max_tokens=Step(case.batch.rows, 9))  # type: ignore[arg-type]
    weights = {name: _whole(weight.detach()).numpy().copy() for name, weight in named_weights(trainer.module).items()}
    return {"weights": weights, "metrics": list(report.metrics.values()), "changed": node.changed()}


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, Ranks]]:
    """Pools of 2 and of 3 ranks."""
    made = {num_ranks: Ranks(num_ranks) for num_ranks in (2, 3)}
    yield made
    for group in made.values():
        group.close()


@pytest.fixture(scope="session")
def folders(model_folder: Callable[[str], Path]) -> dict[str, str]:
    """A model with tied embeddings and norms, and one with biases and learned positions."""
    return {kind: str(model_folder(kind)) for kind in ("qwen2", "gpt2")}


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    for rank in found:
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weight, rtol=0, atol=tolerance, err_msg=name)
    for rank in found[1:]:  # not merely close: ranks that drift apart would never meet again
        assert all(np.array_equal(rank["weights"][name], found[0]["weights"][name]) for name in rank["weights"])
    wanted = {name: metric.value for name, metric in merge([expected["metrics"]]).items()}
    merged = {name: metric.value for name, metric in merge(rank["metrics"] for rank in found).items()}
    assert merged == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@st.composite
def updates(draw: st.DrawFn) -> dict[str, Any]:
    num_groups = draw(st.integers(1, 4))
    return {
        "rows": {
            "num_groups": num_groups,
            "group_size": draw(st.integers(1, 4)),
            "seed": draw(st.integers(0, 9)),
            "longest": draw(st.sampled_from([1, 2, 9])),
        },
        "masked": draw(st.sampled_from([0.0, 0.5, 1.0])),
        "order": draw(st.integers(0, 9)),
        "model": draw(st.sampled_from(["qwen2", "gpt2"])),
        "node": {
            "minibatch": draw(st.integers(1, num_groups)),
            "epochs": draw(st.integers(1, 2)),
            "shuffle": draw(st.booleans()),
            "aggregation": draw(st.sampled_from(AGGREGATIONS)),
            **draw(st.sampled_from([{"kl_coef": 0.0}, *({"kl_coef": 0.1, "kl": kind} for kind in KINDS)])),
            "entropy_coef": draw(st.sampled_from([0.0, 0.01])),
        },
        "max_tokens": draw(st.sampled_from([1, 12, 30, WIDE])),
        "num_ranks": draw(st.sampled_from([1, 2, 3])),
        "max_grad_norm": draw(st.sampled_from([0.5, math.inf])),
        "parallel": draw(st.sampled_from(["ddp", "fsdp2"])),
        "anchored": draw(st.booleans()),
    }


def masked(batch: Batch, share: float, seed: int) -> Batch:
    """With so many of the rows outside the loss."""
    mask = batch.columns["loss_mask"]
    rows = np.random.default_rng(seed).random(len(batch.rows)) < share
    mask.values[rows[mask.jagged.row]] = False  # type: ignore[attr-defined]
    return batch


@given(update=updates())
@settings(max_examples=30, deadline=None)
def test_any_split_of_a_mini_batch_gives_the_same_step(
    update: dict[str, Any], groups: dict[int, Ranks], folders: dict[str, str]
) -> None:
    batch, node = masked(trajectories(**update["rows"]), update["masked"], update["order"]), update["node"]
    if not update["anchored"] and node["epochs"] == 1 and node["minibatch"] == update["rows"]["num_groups"]:
        batch = replace(batch, columns={name: it for name, it in batch.columns.items() if name != "old_log_probs"})
    shuffled = take(batch, np.random.default_rng(update["order"]).permutation(len(batch.rows)))
    spec = ModelSpec(path=folders[update["model"]], trainable=True, optimizer=SGD[update["max_grad_norm"]])
    expected = updated(0, 1, Case(spec, batch, node))
    split = {"max_tokens_per_microbatch": update["max_tokens"]}
    other = Case(spec.model_copy(update={"parallel": update["parallel"]}), shuffled, node | split)
    num_ranks = update["num_ranks"]
    found = [updated(0, 1, other)] if num_ranks == 1 else groups[num_ranks].run(updated, other)
    assert_same(found, expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("num_ranks", "parallel"), [(2, "ddp"), (2, "fsdp2"), (3, "ddp"), (3, "fsdp2")], ids=str)
def test_every_loss_is_the_same_on_ranks_with_copies_and_with_shares(
    num_ranks: int, parallel: str, aggregation: str, groups: dict[int, Ranks], folders: dict[str, str]
) -> None:
    """All terms, two epochs, a last mini-batch of one prompt, rows that are masked as a whole, uneven micro-batches.

    Each aggregation meets each estimator of the divergence, and each of them each way of splitting.
    """
    kind = KINDS[(AGGREGATIONS.index(aggregation) + num_ranks + 2 * (parallel == "fsdp2")) % len(KINDS)]
    batch = masked(trajectories(num_groups=5), 0.2, 0)
    shuffled = take(batch, np.random.default_rng(1).permutation(len(batch.rows)))
    node = {"minibatch": 2, "epochs": 2, "shuffle": True, "aggregation": aggregation, "entropy_coef": 0.01}
    node |= {"kl": kind, "kl_coef": 0.1}
    spec = ModelSpec(path=folders["qwen2"], trainable=True, optimizer=SGD[math.inf])
    expected = updated(0, 1, Case(spec, batch, node))
    split = Case(spec.model_copy(update={"parallel": parallel}), shuffled, node | {"max_tokens_per_microbatch": 12})
    assert_same(groups[num_ranks].run(updated, split), expected)


@pytest.mark.parametrize("clamped", [False, True], ids=["gradient", "loss"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_one_number_that_is_none_changes_nothing_on_any_rank(
    parallel: str, clamped: bool, groups: dict[int, Ranks], folders: dict[str, str]
) -> None:
    """All is as if the call had not been there: weights, moments, the learning rate of the steps after it.

    Where the ratio is clamped, the loss alone is not a number, and that on one rank alone.
    """
    optimizer = OptimizerSpec(lr=0.01, schedule="cosine", warmup_steps=1)
    spec = ModelSpec(path=folders["qwen2"], trainable=True, optimizer=optimizer, parallel=parallel)  # type: ignore[arg-type]
    found = groups[2].run(skipped, spec, trajectories(), clamped)
    for rank in found:
        assert rank["states"][0] == rank["states"][1] != rank["states"][2]
        assert rank["changed"] == [True, False, True]
        assert rank["rates"] == found[0]["rates"]
    first, broken, after = found[0]["rates"]
    assert broken == after != first
    merged = {name: metric.value for name, metric in merge(rank["metrics"] for rank in found).items()}
    assert merged == {"actor/skipped_steps": 1}
    assert found[0]["steps"] == [2, 2, 3]


def skipped(rank: int, num_ranks: int, spec: ModelSpec, batch: Batch, clamped: bool) -> dict[str, Any]:
    """Steps, of which the second has a single advantage that is not a number: all that a checkpoint would hold."""
    from flowrl.nodes._backend.trainer import trainer_of
    from flowrl.nodes.update.policy import Policy

    context = Context("update", "policy", {"policy": spec}, rank, num_ranks, optimizer_steps={"policy": 9})
    node = Policy(minibatch=4, max_tokens_per_microbatch=30)
    node.setup(context)
    trainer = trainer_of(context)
    columns, token = dict(batch.columns), np.flatnonzero(batch.columns["loss_mask"].values)[0]
    advantages, old = columns["advantages"], columns["old_log_probs"].values.copy()
    broken = advantages.values.copy()
    broken[token] = np.nan
    old[token] = 99.0 if clamped else old[token]
    columns["old_log_probs"] = columns["old_log_probs"]._with(old)
    values = [advantages.values, broken, advantages.values]
    found: dict[str, Any] = {"states": [], "changed": [], "rates": [], "steps": []}
    for each in values:
        found["rates"].append(trainer.learning_rate)
        with collect() as report:
            node.run(**(columns | {"advantages": advantages._with(each)}))  # type: ignore[arg-type]
        if each is broken:
            found["metrics"] = list(report.metrics.values())
        tensors = [*trainer.module.state_dict().values()]
        moments = trainer.optimizer.state_dict()["state"]
        tensors += [value for state in moments.values() for value in state.values()]
        local = [getattr(tensor, "to_local", lambda t=tensor: t)() for tensor in tensors]
        found["states"].append(b"".join(tensor.detach().numpy().tobytes() for tensor in local))
        found["changed"].append(node.changed())
        found["steps"].append(trainer.scheduler.state_dict()["_step_count"])
    return found


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_ranks_with_unequal_numbers_of_micro_batches_wait_for_nobody(
    parallel: str, groups: dict[int, Ranks], folders: dict[str, str]
) -> None:
    """Five rows one at a time on two ranks: three micro-batches beside two, of responses of one token and of more."""
    spec = ModelSpec(path=folders["qwen2"], trainable=True, parallel=parallel)  # type: ignore[arg-type]
    for longest in (1, 2, 9):
        batch = trajectories(num_groups=5, group_size=1, longest=longest)
        expected = scored(0, 1, ModelSpec(path=folders["qwen2"]), batch)
        for trainable in (True, False):
            parts = groups[2].run(scored, spec.model_copy(update={"trainable": trainable}), batch)
            assert sorted(len(part) for part in parts) == [2, 3]
            for part in parts:
                for row, values in part.items():
                    assert np.allclose(values, expected[row], atol=1e-5)


def scored(rank: int, num_ranks: int, spec: ModelSpec, batch: Batch) -> dict[Any, np.ndarray]:
    """Log-probabilities of the rank's rows, one row in each micro-batch."""
    from flowrl.nodes.model.logprob import Logprob

    node = Logprob(max_tokens_per_microbatch=1)
    node.setup(Context("score", "model", {"model": spec}, rank, num_ranks))
    found = node.run(**{name: batch.columns[name] for name in ("prompt_ids", "response_ids", "temperature")})  # type: ignore[arg-type]
    rows = zip(found.log_probs.rows.keys(), found.log_probs.jagged, strict=True)
    return {row: np.array(values) for row, values in rows}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_layers_that_are_computed_again_give_the_same_step(
    kind: str, parallel: str, groups: dict[int, Ranks], folders: dict[str, str]
) -> None:
    spec = ModelSpec(path=folders[kind], trainable=True, optimizer=SGD[0.5])
    expected = updated(0, 1, Case(spec, trajectories()))
    changes = {"gradient_checkpointing": True, "parallel": parallel}
    assert_same(groups[2].run(updated, Case(spec.model_copy(update=changes), trajectories())), expected)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_model_may_compute_in_16_bits_while_its_weights_keep_32(
    parallel: str, groups: dict[int, Ranks], folders: dict[str, str]
) -> None:
    spec = ModelSpec(path=folders["qwen2"], trainable=True, optimizer=SGD[0.5])
    batch, wide = trajectories(), updated(0, 1, Case(spec, trajectories()))
    narrow = spec.model_copy(update={"mixed_precision": "bfloat16", "parallel": parallel})
    alone = updated(0, 1, Case(narrow, batch))
    for found in (*groups[2].run(updated, Case(narrow, batch)), alone):
        moved = {name: np.abs(found["weights"][name] - weight).max() for name, weight in wide["weights"].items()}
        assert all(weight.dtype == np.float32 for weight in found["weights"].values())
        assert 1e-7 < max(moved.values()) < 1e-3
    exact = scored(0, 1, ModelSpec(path=folders["qwen2"]), batch)
    rough = {row: values for part in groups[2].run(scored, narrow, batch) for row, values in part.items()}
    distance = max(np.abs(rough[row] - values).max() for row, values in exact.items())
    assert 1e-4 < distance < 0.5


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_model_that_was_moved_to_host_memory_goes_on_as_if_it_had_stayed(
    parallel: str, groups: dict[int, Ranks], folders: dict[str, str]
) -> None:
    spec = ModelSpec(path=folders["qwen2"], trainable=True, parallel=parallel, optimizer=OptimizerSpec(lr=0.01))  # type: ignore[arg-type]
    for stayed, moved in zip(groups[2].run(moving, spec, False), groups[2].run(moving, spec, True), strict=True):
        assert all(np.array_equal(stayed[name], moved[name]) for name in stayed)


def moving(rank: int, num_ranks: int, spec: ModelSpec, move_it: bool) -> dict[str, np.ndarray]:
    """The weights after two steps, between which the model may be moved; here it stays on the CPU all the same."""
    from flowrl.nodes._backend.parallel import move
    from flowrl.nodes._backend.trainer import trainer_of
    from flowrl.nodes._backend.weights import _whole, named_weights
    from flowrl.nodes.update.policy import Policy

    context = Context("update", "policy", {"policy": spec}, rank, num_ranks)
    node = Policy(minibatch=4)
    node.setup(context)
    trainer = trainer_of(context)
    for _ in range(2):
        node.run(**trajectories().columns)  # type: ignore[arg-type]
        if move_it:
            parameters = list(trainer.module.parameters())
            move(trainer.module, trainer.optimizer, "cpu")
            assert all(a is b for a, b in zip(parameters, trainer.module.parameters(), strict=True))
    return {name: _whole(weight.detach()).numpy().copy() for name, weight in named_weights(trainer.module).items()}
