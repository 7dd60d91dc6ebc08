"""A model that is spread over two processes (FSDP2, gloo) sends its whole weights, bucket by bucket."""

import multiprocessing
import os
import socket
from typing import Any

import numpy as np
import pytest


def send(rank: int, port: int, results: Any) -> None:
    """Shard, train a step, send; and what an unsharded copy of the model is after the same step."""
    import torch
    from torch.distributed.fsdp import fully_shard

    from flowrl.model import ModelSpec
    from flowrl.node import Context
    from flowrl.nodes._backend.models import load_model
    from flowrl.nodes._backend.transport import stream
    from flowrl.nodes._backend.weights import is_sharded

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    whole, model = (load_model(ModelSpec(path="arith-tiny")) for _ in range(2))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert is_sharded(model)
    assert not is_sharded(whole)
    for each in (whole, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(input_ids=torch.arange(3, 9)[None]).logits.square().mean().backward()
        optimizer.step()
    context = Context(rank=rank, num_ranks=2)
    found = {}
    for dtype in ("float32", "bfloat16"):
        parts = list(stream(context, model, [], "auto", 300_000, dtype, True))
        found[dtype] = [{name: array.copy() for name, array in part.arrays.items()} for part in parts]
    expected = {name: weight.detach().numpy() for name, weight in whole.named_parameters()}
    results.put((rank, found, expected))
    results.close()
    results.join_thread()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sent() -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [spawn.Process(target=send, args=(rank, port, results), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=120) for _ in workers]
    for worker in workers:
        worker.join(10)
    return {rank: (parts, expected) for rank, parts, expected in found}


def test_rank_0_sends_whole_tensors_and_the_others_nothing(sent: dict[int, Any]) -> None:
    parts, expected = sent[0]
    assert len(parts["float32"]) > 3
    joined = {name: array for part in parts["float32"] for name, array in part.items()}
    assert joined.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(joined[name], array, atol=1e-6)
    assert sent[1][0] == {"float32": [], "bfloat16": []}


def test_a_shard_is_cast_before_it_is_gathered(sent: dict[int, Any]) -> None:
    import torch

    parts, _ = sent[0]
    wide = {name: array for part in parts["float32"] for name, array in part.items()}
    narrow = {name: array for part in parts["bfloat16"] for name, array in part.items()}
    for name, array in wide.items():
        assert np.array_equal(torch.from_numpy(array).bfloat16().view(torch.int16).numpy(), narrow[name])
