"""Metrics of an update say the same of the same batch, however it is cut into micro-batches, mini-batches and epochs.

That ranks change nothing either is in `test_two_ranks.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from trajectories import trajectories

from flowrl.batch import Batch, Step
from flowrl.metrics import collect, merge
from flowrl.model import OptimizerSpec
from flowrl.node import Context
from flowrl.nodes._backend.engine import Completion
from flowrl.nodes._backend.rollouts import report
from flowrl.nodes.update.policy import Policy

OF_THE_LOSS = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/grad_norm")
OF_TOKENS = ("actor/entropy", "actor/clip_fraction", "mismatch/log_ratio", "mismatch/kl")


def metrics_of(context: Context, batch: Batch, **settings: int) -> dict[str, float]:
    """Of updates that change no weight, so that only the cut differs."""
    still = OptimizerSpec(type="torch.optim:SGD", lr=1e-30)
    spec = context.models["policy"].model_copy(update={"optimizer": still})
    context = replace(context, shared={}, models={"policy": spec})
    node = Policy(**({"minibatch": 4, "kl_coef": 0.1, "entropy_coef": 0.01} | settings))  # type: ignore[arg-type]
    node.setup(context)
    columns = {**batch.columns, "rollout_log_probs": batch.columns["old_log_probs"] - 0.1}  # type: ignore[operator]
    with collect() as found:
        node.run(**columns, max_tokens=Step(batch.rows, 9))  # type: ignore[arg-type]
    return {name: part.value for name, part in found.metrics.items()}


@pytest.fixture
def expected(context: Context) -> dict[str, float]:
    return metrics_of(context, trajectories())


@pytest.mark.parametrize("max_tokens", [1, 25, 60, 10_000])
def test_micro_batches_change_no_metric(max_tokens: int, context: Context, expected: dict[str, float]) -> None:
    found = metrics_of(context, trajectories(), max_tokens_per_microbatch=max_tokens)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert expected.keys() >= {*OF_THE_LOSS, *OF_TOKENS}


@pytest.mark.parametrize("epochs", [2, 3])
def test_epochs_change_no_mean(epochs: int, context: Context, expected: dict[str, float]) -> None:
    found = metrics_of(context, trajectories(), epochs=epochs)
    for name in (*OF_THE_LOSS, *OF_TOKENS, "actor/lr"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def test_mini_batches_change_no_mean_over_tokens(context: Context, expected: dict[str, float]) -> None:
    """That of the loss is over optimizer steps, each of which has a denominator of its own."""
    found = metrics_of(context, trajectories(), minibatch=1)
    for name in OF_TOKENS:
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7), name


def completion(length: int, reason: str, version: int = 0) -> Completion:
    numbers = np.arange(length)
    return Completion(numbers, numbers.astype(np.float32), np.full(length, version), "", reason)


def test_lengths_are_those_of_all_tokens_in_whatever_blocks_they_come() -> None:
    """A response that ran out of tokens counts, although a filter may take it out of the loss (CASES 48)."""
    done = [completion(3, "stop", 7), completion(10, "length", 5), completion(0, "stop")]
    blocks = []
    for cut in ([done], [done[:1], done[1:]], [done[2:], [], done[:2]]):
        parts = []
        for block in cut:
            with collect() as found:
                report(block, np.full(len(block), 4))
            parts.append(found.metrics.values())
        blocks.append({name: part.value for name, part in merge(parts).items()})
    assert blocks[0] == blocks[1] == blocks[2]
    names = (
        "rollout/tokens",
        "rollout/response_length/min",
        "rollout/response_length/max",
        "rollout/prompt_length/mean",
    )
    assert [blocks[0][name] for name in names] == [13, 0, 10, 4]
    assert blocks[0]["rollout/finish/length"] == pytest.approx(1 / 3)
    assert blocks[0]["rollout/policy_version/min"] == 5
    assert blocks[0]["rollout/policy_version/mean"] == 6


def test_nothing_finished_is_no_metric_that_lies() -> None:
    with collect() as found:
        report([], np.zeros(0, dtype=np.int64))
    values = {name: part.value for name, part in found.metrics.items()}
    assert "rollout/response_length/min" not in values
    assert math.isnan(values["rollout/response_length/mean"])
