"""Two training workers with uneven shards do what one does (gloo, two processes)."""

import multiprocessing
import os
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from trajectories import trajectories

from flowrl.join import canonical, take
from flowrl.metrics import collect, merge
from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes.model.logprob import Logprob
from flowrl.nodes.update.policy import Policy

SGD = OptimizerSpec(type="torch.optim:SGD", lr=1.0, max_grad_norm=0.5)
SPEC = ModelSpec(path="arith-tiny", trainable=True, optimizer=SGD)


def train(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """Two steps under SGD on seven rows, the second of one prompt only; what is left is as a worker would leave it."""
    from flowrl.nodes._backend.trainer import trainer_of
    from flowrl.nodes._backend.weights import named_weights

    if num_ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {name: str(value) for name, value in (names | {"MASTER_PORT": port}).items()}
    context = Context(model="policy", models={"policy": SPEC}, rank=rank, num_ranks=num_ranks)
    batch = canonical(take(trajectories(num_groups=3), np.array([0, 1, 2, 3, 4, 5, 8])))
    update = Policy(minibatch=2, kl_coef=0.1, entropy_coef=0.01, max_tokens_per_microbatch=25)
    logprob = Logprob(max_tokens_per_microbatch=25)
    update.setup(context)
    logprob.setup(context)
    trainer = trainer_of(context)
    ids = {name: batch.columns[name] for name in ("prompt_ids", "response_ids", "temperature")}
    scored = logprob.run(**ids).log_probs  # type: ignore[arg-type]
    with collect() as report:
        update.run(**batch.columns)  # type: ignore[arg-type]
    return {
        "rows": scored.rows.keys(),
        "log_probs": [row.tolist() for row in scored.jagged],
        "weights": {name: value.detach().numpy().copy() for name, value in named_weights(trainer.module).items()},
        "metrics": list(report.metrics.values()),
    }


def start(rank: int, port: int, results: Any) -> None:
    results.put((rank, train(rank, 2, port)))


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [spawn.Process(target=start, args=(rank, port, results), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=90) for _ in workers)
    for worker in workers:
        worker.join(10)
    return [found[0], found[1]]


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return train(0, 1, 0)


def test_all_ranks_hold_the_weights_that_one_rank_would(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    for name, weight in one["weights"].items():
        assert np.array_equal(two[0]["weights"][name], two[1]["weights"][name])
        assert np.allclose(two[0]["weights"][name], weight, atol=1e-6)


def test_metrics_of_two_ranks_merge_to_those_of_one(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    expected = {name: metric.value for name, metric in merge([one["metrics"]]).items()}
    merged = {name: metric.value for name, metric in merge(rank["metrics"] for rank in two).items()}
    assert merged == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_each_rank_scores_its_own_rows(one: dict[str, Any], two: list[dict[str, Any]]) -> None:
    expected = dict(zip(one["rows"], one["log_probs"], strict=True))
    assert sorted(two[0]["rows"] + two[1]["rows"]) == sorted(expected)
    assert len(two[0]["rows"]) != len(two[1]["rows"])
    for rank in two:
        for row, log_probs in zip(rank["rows"], rank["log_probs"], strict=True):
            assert np.allclose(log_probs, expected[row], atol=1e-5)


def test_a_frozen_model_is_scored_without_a_process_group() -> None:
    spec = ModelSpec(path="arith-tiny")
    batch = trajectories(num_groups=1, group_size=1)
    ids = {name: batch.columns[name] for name in ("prompt_ids", "response_ids", "temperature")}
    context = Context(model="reference", models={"reference": spec}, num_ranks=2)
    sizes = []
    for rank in range(2):
        node = Logprob()
        node.setup(replace(context, rank=rank, shared={}))
        sizes.append(len(node.run(**ids).log_probs.rows))  # type: ignore[arg-type]
    assert sizes == [1, 0]
