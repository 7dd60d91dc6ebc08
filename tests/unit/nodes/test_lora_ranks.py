"""LoRA over two gloo processes: copies (ddp) and shards (fsdp2) train, and send, what one process does."""

import multiprocessing
import os
import socket
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from trajectories import trajectories

from flowrl.model import LoraSpec, ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes.model.logprob import Logprob
from flowrl.nodes.update.policy import Policy


def train(rank: int, num_ranks: int, port: int, parallel: Any = "ddp") -> dict[str, Any]:
    """Read the reference, take two steps, send; then read the reference again."""
    from flowrl.nodes._backend.trainer import trainer_of
    from flowrl.nodes._backend.transport import stream

    if num_ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {name: str(value) for name, value in (names | {"MASTER_PORT": port}).items()}
    spec = ModelSpec(
        path="arith-tiny", trainable=True, lora=LoraSpec(rank=4, alpha=4), parallel=parallel,
        optimizer=OptimizerSpec(type="torch.optim:SGD", lr=1.0, max_grad_norm=0.5),
    )  # fmt: skip
    models = {"policy": spec, "reference": ModelSpec(path="arith-tiny")}
    context = Context(model="policy", models=models, rank=rank, num_ranks=num_ranks, trained=("policy",))
    update, reference = Policy(minibatch=2, epochs=2, kl_coef=0.1, max_tokens_per_microbatch=25), Logprob()
    reference.setup(replace(context, model="reference"))
    update.setup(context)
    trainer = trainer_of(context)
    batch = trajectories(num_groups=4)
    ids = {name: batch.columns[name] for name in ("prompt_ids", "response_ids", "temperature")}
    before = reference.run(**ids).log_probs  # type: ignore[arg-type]
    update.run(**batch.columns)  # type: ignore[arg-type]
    after = reference.run(**ids).log_probs  # type: ignore[arg-type]
    assert np.array_equal(before.values, after.values)
    sent = {}
    for part in stream(context, trainer.module, [], "auto", 1 << 18, "float32", True):
        sent |= {name: array.copy() for name, array in part.arrays.items()}
    whole = {
        name: getattr(value, "full_tensor", lambda value=value: value)()
        for name, value in trainer.module.named_parameters()
    }
    held = {name: value.detach().numpy().copy() for name, value in whole.items()}
    return {"sent": sent, "held": held, "scored": dict(zip(after.rows.keys(), map(list, after.jagged), strict=True))}


def train_shares(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """The same on shares of the weights."""
    return train(rank, num_ranks, port, "fsdp2")


def shard(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    """Shard a model with adapters by hand, take a step, send; and the same of a model in one piece."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from flowrl.nodes._backend.lora import adapters_off, training_model
    from flowrl.nodes._backend.transport import stream

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        targets = ["q_proj", "down_proj", "embed_tokens"]
        spec = ModelSpec(
            path="arith-tiny",
            trainable=True,
            dtype=dtype,
            lora=LoraSpec(rank=3, target_modules=targets),  # type: ignore[arg-type]
        )
        whole, model = (training_model(spec) for _ in range(2))
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        ids = torch.arange(3, 9)[None]
        for each in (whole, model):
            optimizer = torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=1.0)
            for _ in range(2):
                optimizer.zero_grad()
                each(input_ids=ids).logits.float().square().mean().backward()
                optimizer.step()
        kinds = (("whole", whole), ("sharded", model))
        found[dtype] = {kind: {} for kind, _ in kinds}
        for kind, each in kinds:
            for part in stream(Context(num_ranks=num_ranks), each, [], "auto", 300_000, "float32", True):
                found[dtype][kind] |= {name: array.copy() for name, array in part.arrays.items()}
        for kind, each in kinds:
            with adapters_off(each), torch.no_grad():
                found[dtype][kind]["off"] = each(input_ids=ids).logits.float().numpy()
    torch.distributed.destroy_process_group()
    return found


def start(work: Any, rank: int, port: int, results: Any) -> None:
    results.put((rank, work(rank, 2, port)))
    results.close()
    results.join_thread()


def on_two(work: Any) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [spawn.Process(target=start, args=(work, rank, port, results), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = dict(results.get(timeout=120) for _ in workers)
    for worker in workers:
        worker.join(10)
    return [found[0], found[1]]


@pytest.mark.parametrize("work", [train, train_shares])
def test_two_ranks_train_and_send_what_one_does(work: Any) -> None:
    one, two = train(0, 1, 0), on_two(work)
    assert max(np.abs(value).max() for name, value in one["held"].items() if "lora_B" in name) > 0.01
    assert two[1]["sent"] == {}
    assert two[0]["sent"].keys() == one["sent"].keys()
    # Adam divides by the square roots of tiny numbers, which enlarges what sums over ranks round otherwise.
    for name, weight in one["sent"].items():
        np.testing.assert_allclose(two[0]["sent"][name], weight, atol=1e-5)
    for name, weight in one["held"].items():
        assert np.array_equal(two[0]["held"][name], two[1]["held"][name])
        np.testing.assert_allclose(two[0]["held"][name], weight, atol=1e-5)
    scored = two[0]["scored"] | two[1]["scored"]
    assert scored.keys() == one["scored"].keys()
    for row, log_probs in one["scored"].items():
        np.testing.assert_allclose(scored[row], log_probs, atol=1e-5)


def test_shards_are_merged_and_sent_whole() -> None:
    ranks = on_two(shard)
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-4)):
        whole, sharded = ranks[0][dtype]["whole"], ranks[0][dtype]["sharded"]
        assert sharded.keys() == whole.keys()
        assert not any("lora" in name or "base_layer" in name for name in sharded)
        for name, weight in whole.items():
            np.testing.assert_allclose(sharded[name], weight, atol=tolerance)
        assert ranks[1][dtype]["sharded"].keys() == whole.keys()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)
