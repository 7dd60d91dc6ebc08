"""`update.value` and `model.values`: one step however it is split, and a critic that learns."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from trajectories import trajectories

from flowrl.batch import Batch, PromptToken, Token
from flowrl.join import take
from flowrl.metrics import collect, merge
from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.model_files import ASSETS
from flowrl.node import CYCLE, Context
from flowrl.nodes._backend.losses import aggregate, denominator, value_loss
from flowrl.nodes._backend.value_head import load_headed
from flowrl.nodes.model.values import Values
from flowrl.nodes.update.policy import Policy
from flowrl.nodes.update.value import Value
from flowrl.rows import Rows

CLASSIFIER = str(ASSETS.parent / "_backend" / "toy_classifier")
ORACLE = json.loads((Path(__file__).parents[2] / "data" / "core_algorithms.json").read_text())
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
SGD = OptimizerSpec(type="torch.optim:SGD", lr=1e-3, max_grad_norm=math.inf)
CRITIC = ModelSpec(path=CLASSIFIER, head="value", trainable=True, optimizer=SGD)
WIDE = 10**6
"""Tokens of a micro-batch that holds everything."""
MOVED = 1e-3
"""How far a step moves some weight at least: else a comparison within 1e-6 would say little."""


def batch_of(**rows: Any) -> Batch:
    """Trajectories with the values that a critic gave and the returns that it should give."""
    batch = trajectories(**rows)
    columns = batch.columns | {"values": batch.columns["advantages"], "returns": batch.columns["old_log_probs"]}
    return Batch(batch.rows, columns, batch.types | dict.fromkeys(("values", "returns"), batch.types["advantages"]))


def trained(rank: int, num_ranks: int, spec: ModelSpec, batch: Batch, node: dict[str, Any]) -> dict[str, Any]:
    """Values before an update of a fresh critic, by row; what is left of it, whole; and what was reported."""
    from flowrl.nodes._backend.trainer import trainer_of
    from flowrl.nodes._backend.weights import _whole, named_weights

    context = Context("update", "critic", {"critic": spec}, rank, num_ranks)
    update = Value(**{"minibatch": 100, "max_tokens_per_microbatch": WIDE} | node)
    values = Values(max_tokens_per_microbatch=update.max_tokens_per_microbatch)
    update.setup(context)
    values.setup(context)
    columns = dict(batch.columns)
    found = values.run(columns["prompt_ids"], columns["response_ids"]).values  # type: ignore[arg-type]
    with collect() as report:
        update.run(**{name: columns[name] for name in Value.input_ports if name in columns})  # type: ignore[arg-type]
    weights = named_weights(trainer_of(context).module)
    return {
        "values": {row: list(map(float, own)) for row, own in zip(found.rows.names(), found.jagged, strict=True)},
        "weights": {name: _whole(weight.detach()).float().numpy().copy() for name, weight in weights.items()},
        "metrics": list(report.metrics.values()),
        "changed": update.changed(),
    }


def assert_same(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for rank in found:
        for name, weight in expected["weights"].items():
            np.testing.assert_allclose(rank["weights"][name], weight, rtol=0, atol=1e-6, err_msg=name)
    values = {row: own for rank in found for row, own in rank["values"].items()}
    assert values.keys() == expected["values"].keys()
    for row, own in values.items():
        np.testing.assert_allclose(own, expected["values"][row], rtol=0, atol=1e-6, err_msg=row)
    wanted = {name: metric.value for name, metric in merge([expected["metrics"]]).items()}
    merged = {name: metric.value for name, metric in merge(rank["metrics"] for rank in found).items()}
    assert merged == pytest.approx(wanted, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_clipped_loss_and_its_gradient_are_those_of_the_oracle(aggregation: Any) -> None:
    case, inputs = ORACLE["value_loss"][aggregation], ORACLE["inputs"]
    lengths = [len(row) for row in inputs["values"]]

    def flat(rows: Any) -> torch.Tensor:
        return torch.tensor([value for row, length in zip(rows, lengths, strict=True) for value in row[:length]])

    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask, values = flat(inputs["response_mask"]).bool(), flat(case["vpreds"]).requires_grad_()
    losses = value_loss(values, flat(inputs["values"]), flat(case["returns"]), case["clip"])
    loss = aggregate(losses, row, mask, aggregation, denominator(mask, row, aggregation, 0))
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, flat(case["grad"]), rtol=1e-5, atol=1e-6)


def test_a_value_that_has_moved_past_the_clip_is_pulled_back_alone_never_pushed_on() -> None:
    values = torch.tensor([0.5, -0.5, 0.5, 0.1], requires_grad=True)
    old, returns = torch.zeros(4), torch.tensor([1.0, -1.0, -1.0, 1.0])
    (gradient,) = torch.autograd.grad(value_loss(values, old, returns, 0.2).sum(), values)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 1.5, -0.9])
    plain = value_loss(values, old, returns, math.inf)
    assert plain.tolist() == pytest.approx(
        [(v - r) ** 2 / 2 for v, r in zip(values.tolist(), returns.tolist(), strict=True)]
    )


def test_micro_batches_and_the_order_of_rows_change_nothing() -> None:
    batch = batch_of()
    for aggregation in AGGREGATIONS:
        node = {"minibatch": 2, "epochs": 2, "shuffle": True, "aggregation": aggregation}
        expected, fresh = trained(0, 1, CRITIC, batch, node), load_headed(CRITIC).state_dict()
        assert expected["changed"]
        assert max(np.abs(new - fresh[name].numpy()).max() for name, new in expected["weights"].items()) > MOVED
        shuffled = take(batch, np.random.default_rng(1).permutation(len(batch.rows)))
        for max_tokens in (1, 30):
            assert_same([trained(0, 1, CRITIC, shuffled, node | {"max_tokens_per_microbatch": max_tokens})], expected)


def test_what_lies_outside_the_mask_reaches_nothing() -> None:
    batch = batch_of()
    expected = trained(0, 1, CRITIC, batch, {})
    outside = ~batch.columns["loss_mask"].values
    spoiled = {}
    for name in ("values", "returns"):
        column = batch.columns[name]
        spoiled[name] = column._with(np.where(outside, np.nan, column.values))  # type: ignore[attr-defined]
    assert_same([trained(0, 1, CRITIC, replace(batch, columns=batch.columns | spoiled), {})], expected)


def test_a_corrected_mask_leaves_the_tokens_out_that_the_policy_does_not_learn_from() -> None:
    batch = batch_of()
    mask: Token[bool] = batch.columns["loss_mask"]  # type: ignore[assignment]
    kept = Token(batch.rows, np.arange(len(mask.values)) % 3 > 0, mask.offsets)
    types = batch.types | {"corrected_mask": batch.types["loss_mask"]}
    narrowed = Batch(batch.rows, batch.columns | {"loss_mask": mask & kept}, batch.types)
    corrected = Batch(batch.rows, batch.columns | {"corrected_mask": kept}, types)
    expected = trained(0, 1, CRITIC, narrowed, {})
    assert_same([trained(0, 1, CRITIC, corrected, {})], expected)
    whole = trained(0, 1, CRITIC, batch, {})
    assert any(np.abs(whole["weights"][name] - weight).max() > 1e-5 for name, weight in expected["weights"].items())


def test_an_empty_mask_takes_no_step_and_a_return_that_is_no_number_is_skipped() -> None:
    batch = batch_of()
    nothing = {"loss_mask": batch.columns["loss_mask"] & False}  # type: ignore[operator]
    found = trained(0, 1, CRITIC, replace(batch, columns=batch.columns | nothing), {})
    assert not found["changed"]
    assert {one.name: one.value for one in found["metrics"]} == {"critic/empty_minibatches": 1}
    broken = {"returns": batch.columns["returns"] * math.nan}  # type: ignore[operator]
    found = trained(0, 1, CRITIC, replace(batch, columns=batch.columns | broken), {})
    assert not found["changed"]
    assert {one.name: one.value for one in found["metrics"]}["critic/skipped_steps"] == 1


def test_what_is_reported_is_what_the_formulas_say() -> None:
    batch, clip = batch_of(), 0.5
    found = trained(0, 1, CRITIC, batch, {"clip": clip})
    metrics = {metric.name: metric.value for metric in found["metrics"]}
    mask = batch.columns["loss_mask"].values
    old, returns = (batch.columns[name].values[mask].astype(np.float64) for name in ("values", "returns"))
    new = np.concatenate([found["values"][row] for row in batch.rows.names()])[mask]
    kept = np.clip(new, old - clip, old + clip)
    losses = np.maximum((new - returns) ** 2, (kept - returns) ** 2) / 2
    assert metrics["critic/loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert metrics["critic/value"] == pytest.approx(new.mean(), rel=1e-5)
    assert metrics["critic/return"] == pytest.approx(returns.mean(), rel=1e-5)
    assert metrics["critic/clip_fraction"] == pytest.approx(((kept - returns) ** 2 > (new - returns) ** 2).mean())
    assert 0 < metrics["critic/clip_fraction"] < 1
    assert metrics["critic/explained_variance"] == pytest.approx(1 - np.var(returns - old) / np.var(returns), rel=1e-5)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """A pool of two ranks."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@st.composite
def updates(draw: st.DrawFn) -> dict[str, Any]:
    num_groups = draw(st.integers(1, 3))
    return {
        "rows": {
            "num_groups": num_groups,
            "group_size": draw(st.integers(1, 3)),
            "seed": draw(st.integers(0, 9)),
            "longest": draw(st.sampled_from([1, 2, 9])),
        },
        "node": {
            "minibatch": draw(st.integers(1, num_groups)),
            "epochs": draw(st.integers(1, 2)),
            "clip": draw(st.sampled_from([0.2, math.inf])),
            "aggregation": draw(st.sampled_from(AGGREGATIONS)),
        },
        "max_tokens": draw(st.sampled_from([1, 12, 30, WIDE])),
        "parallel": draw(st.sampled_from(["ddp", "fsdp2"])),
        "kind": draw(st.sampled_from(["qwen2", "gpt2", "classifier"])),
        "order": draw(st.integers(0, 9)),
    }


@given(update=updates())
@settings(max_examples=12, deadline=None)
def test_two_ranks_with_copies_or_shares_do_what_one_does(
    update: dict[str, Any], two: Ranks, model_folder_of: dict[str, str]
) -> None:
    batch, node = batch_of(**update["rows"]), update["node"]
    spec = CRITIC.model_copy(update={"path": model_folder_of[update["kind"]]})
    shuffled = take(batch, np.random.default_rng(update["order"]).permutation(len(batch.rows)))
    split = spec.model_copy(update={"parallel": update["parallel"]})
    found = two.run(trained, split, shuffled, node | {"max_tokens_per_microbatch": update["max_tokens"]})
    assert_same(found, trained(0, 1, spec, batch, node))


@pytest.fixture(scope="module")
def model_folder_of(model_folder: Callable[[str], Path]) -> dict[str, str]:
    """A critic of tied embeddings and norms, one of biases and learned positions, and one of a reward model."""
    return {kind: str(model_folder(kind)) for kind in ("qwen2", "gpt2")} | {"classifier": CLASSIFIER}


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_critic_may_compute_in_16_bits_and_layers_again(parallel: str, two: Ranks) -> None:
    batch, changes = batch_of(), {"gradient_checkpointing": True, "parallel": parallel}
    assert_same(two.run(trained, CRITIC.model_copy(update=changes), batch, {}), trained(0, 1, CRITIC, batch, {}))
    narrow = CRITIC.model_copy(update={"mixed_precision": "bfloat16", "parallel": parallel})
    exact = trained(0, 1, CRITIC, batch, {})["values"]
    rough = {row: own for rank in two.run(trained, narrow, batch, {}) for row, own in rank["values"].items()}
    furthest = max(abs(a - b) for row, own in exact.items() for a, b in zip(own, rough[row], strict=True))
    assert 1e-5 < furthest < 0.2


def both(context: Context) -> tuple[Policy, Value, Values]:
    """Nodes of a policy and of a critic on one worker."""
    nodes = Policy(minibatch=4, after_step=2), Value(minibatch=4), Values()
    for node, model in zip(nodes, ("policy", "critic", "critic"), strict=True):
        node.setup(replace(context, model=model))
    return nodes


def test_the_critic_learns_alone_until_the_policy_begins(context: Context) -> None:
    from flowrl.nodes._backend.trainer import trainer_of

    context.models = {**context.models, "critic": CRITIC}
    policy, critic, values = both(context)
    batch = batch_of()
    weights = {
        name: torch.nn.utils.parameters_to_vector(trainer_of(replace(context, model=name)).module.parameters()).detach()
        for name in ("policy", "critic")
    }
    moved: list[tuple[bool, bool]] = []
    for step in (1, 2, 3):
        context.shared[CYCLE] = step
        with collect() as report:
            policy.run(**{name: batch.columns.get(name) for name in Policy.input_ports})  # type: ignore[arg-type]
            critic.run(**{name: batch.columns.get(name) for name in Value.input_ports})  # type: ignore[arg-type]
        assert ("actor/waiting" in report.metrics) == (step <= 2) == ("actor/loss" not in report.metrics)
        moved.append((policy.changed(), critic.changed()))
        now = torch.nn.utils.parameters_to_vector(trainer_of(replace(context, model="policy")).module.parameters())
        assert torch.equal(now, weights["policy"]) == (step <= 2)
    assert moved == [(False, True), (False, True), (True, True)]
    now = torch.nn.utils.parameters_to_vector(trainer_of(replace(context, model="critic")).module.parameters())
    assert not torch.equal(now, weights["critic"])
    again = both(replace(context, shared={}))
    for old, new in zip((policy, critic), again, strict=False):
        new.load_state(old.state())
    columns = batch.columns["prompt_ids"], batch.columns["response_ids"]
    assert np.array_equal(again[2].run(*columns).values.values, values.run(*columns).values.values)  # type: ignore[arg-type]


def test_a_critic_learns_returns_that_the_prompt_tells() -> None:
    """The return is 1 where the prompt's first token is even, and -1 elsewhere, as a fresh critic cannot know."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(2, 20, 4) for _ in range(64)]
    rows = Rows.of([f"u{group}" for group in range(len(prompts))])
    signs = [1.0 if prompt[0] % 2 == 0 else -1.0 for prompt in prompts]
    returns = Token.of(rows, [[sign] * 3 for sign in signs], "float")
    ids = PromptToken.of(rows, prompts), Token.of(rows, [[2, 3, 1]] * len(prompts), "int")
    optimizer = OptimizerSpec(lr=3e-3)
    spec = ModelSpec(path="arith-tiny", head="value", trainable=True, optimizer=optimizer)
    context = Context(model="critic", models={"critic": spec})
    update, values = Value(minibatch=16, clip=0.5), Values()
    update.setup(context)
    values.setup(context)
    explained = []
    for _ in range(12):
        found = values.run(*ids).values
        with collect() as report:
            update.run(*ids, loss_mask=returns * 0 == 0, values=found, returns=returns)  # type: ignore[arg-type]
        explained.append(report.metrics["critic/explained_variance"].value)
    assert explained[0] == 0
    assert explained[-1] > 0.9, explained
    assert np.sign(found.values).tolist() == returns.values.tolist()
