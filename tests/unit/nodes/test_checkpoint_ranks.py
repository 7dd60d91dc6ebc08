"""Saved with two ranks, gone on with one, two or three: with copies of the model or with shares of it."""

from __future__ import annotations

import multiprocessing
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.engine.call import WorkerSetup
from flowrl.engine.states import States
from flowrl.model import LoraSpec, ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes.update.policy import Policy
from flowrl.rows import Array

OPTIMIZER = OptimizerSpec(lr=1e-3, weight_decay=0.1, schedule="linear", warmup_steps=2)
Weights = dict[str, Array]


def a_node(rank: int, num_ranks: int, port: int, parallel: str) -> tuple[Policy, States, Any]:
    """An update with its trainer, in a process of its own."""
    from flowrl.nodes._backend.trainer import trainer_of

    if num_ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {name: str(value) for name, value in (names | {"MASTER_PORT": port}).items()}
    lora = LoraSpec(rank=4) if parallel.endswith("lora") else None
    spec = ModelSpec(
        path="arith-tiny", trainable=True, parallel=parallel.split()[0], lora=lora, optimizer=OPTIMIZER
    )  # fmt: skip
    models = {"policy": spec}
    context = Context(model="policy", models=models, rank=rank, num_ranks=num_ranks, optimizer_steps={"policy": 10})
    node = Policy(minibatch=2)
    node.setup(context)
    setup = WorkerSetup("train", rank, num_ranks, (), models, 0, 1)
    return node, States(setup, {"update": node}, ()), trainer_of(context)


def train(trainer: Any, num_steps: int) -> None:
    import torch

    ids = torch.arange(24).reshape(3, 8) % 19
    for _ in range(num_steps):
        trainer.step([ids], lambda model, rows: model(input_ids=rows).logits.float().pow(2).mean() / trainer._num_ranks)


def whole(trainer: Any) -> Weights:
    state = {name: getattr(value, "full_tensor", lambda value=value: value)() for name, value in
             trainer.module.named_parameters()}  # fmt: skip
    return {name: value.detach().numpy().copy() for name, value in state.items()}


def save(rank: int, num_ranks: int, port: int, parallel: str, folder: str) -> list[Weights]:
    """The weights at the save, and two steps later."""
    _, states, trainer = a_node(rank, num_ranks, port, parallel)
    train(trainer, 2)
    states.copy(folder)
    saved = whole(trainer)
    train(trainer, 2)  # beside the writing
    files = states.written()
    assert f"random/train-{rank}.pickle" in files
    return [saved, whole(trainer)]


def go_on(rank: int, num_ranks: int, port: int, parallel: str, folder: str) -> list[Weights]:
    """The weights that were loaded, and two steps later."""
    _, states, trainer = a_node(rank, num_ranks, port, parallel)
    states.restore(folder)
    loaded = whole(trainer)
    train(trainer, 2)
    return [loaded, whole(trainer)]


def start(call: Any, rank: int, results: Any, *arguments: Any) -> None:
    results.put((rank, call(rank, *arguments)))


def on_ranks(call: Any, num_ranks: int, parallel: str, folder: Path) -> list[list[Weights]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [
        spawn.Process(target=start, args=(call, rank, results, num_ranks, port, parallel, str(folder)), daemon=True)
        for rank in range(num_ranks)
    ]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(10)
    return [found[rank] for rank in range(num_ranks)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Weights]]]:
    folders = {parallel: tmp_path_factory.mktemp(parallel) for parallel in ("ddp", "fsdp2", "fsdp2 lora")}
    return {parallel: (folder, on_ranks(save, 2, parallel, folder)[0]) for parallel, folder in folders.items()}


@pytest.mark.parametrize(
    ("before", "num_ranks", "after"),
    [
        ("ddp", 1, "ddp"),
        ("ddp", 3, "fsdp2"),
        ("fsdp2", 3, "ddp"),
        ("fsdp2", 3, "fsdp2"),
        ("fsdp2 lora", 1, "ddp lora"),
    ],
)
def test_another_number_of_ranks_goes_on_with_the_same_weights(
    before: str, num_ranks: int, after: str, saved: dict[str, tuple[Path, list[Weights]]]
) -> None:
    folder, (at_the_save, later) = saved[before]
    for loaded, trained in on_ranks(go_on, num_ranks, after, folder):
        for name, weight in at_the_save.items():
            assert np.array_equal(loaded[name], weight), name
        for name, weight in later.items():
            assert np.allclose(trained[name], weight, atol=1e-6), name
