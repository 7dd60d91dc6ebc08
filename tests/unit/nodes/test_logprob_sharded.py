"""Log-probabilities and gradients of a model over two processes (DDP, FSDP2; gloo) are those of one that is whole."""

import multiprocessing
import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

WAYS = ["ddp", "fsdp2", "fsdp2, head alone", "fsdp2, tied", "fsdp2, capped", "fsdp2, LoRA on the head"]


def work(rank: int, port: int, results: Any) -> None:
    """One rank's log-probabilities, and how far gradients are from those of a whole model, for each way."""
    import torch

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    for way in WAYS:
        results.put((way, compare(way, rank)))
    torch.distributed.destroy_process_group()
    results.close()
    results.join_thread()


def compare(way: str, rank: int) -> float:
    """Largest difference of a gradient, as a part of the largest gradient."""
    import torch

    from flowrl.nodes._backend.logprob import token_log_probs
    from flowrl.rows import Jagged

    # Unequal: one rank has a single token to predict, so that its prompts say it all.
    prompts = Jagged.of([[3, 4, 5], [6, 7]], np.int64)
    responses = (Jagged.of([[8, 9, 10, 11], [12]], np.int64), Jagged.of([[5], [6]], np.int64))
    whole, model = make(way), parallel(way)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            mine = [token_log_probs(model, prompts, responses[rank], 0.7, "gradient") for _ in range(2)]
    assert all(len(log_probs) == len(responses[rank].values) for log_probs, _ in mine)
    torch.stack([log_probs.sum() + entropy.sum() for log_probs, entropy in mine]).sum().mul(2).backward()
    for each in responses:
        for _ in range(2):
            log_probs, entropy = token_log_probs(whole, prompts, each, 0.7, "gradient")
            (log_probs.sum() + entropy.sum()).backward()
        if each is responses[rank]:
            torch.testing.assert_close(mine[0][0], log_probs, rtol=1e-5, atol=1e-5)
    found = dict(getattr(model, "module", model).named_parameters())
    furthest = 0.0
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            gradient = found[name].grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            furthest = max(furthest, float((gradient - parameter.grad).abs().max() / parameter.grad.abs().max()))
    return furthest


def make(way: str) -> Any:
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"vocab_size": 101, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": "tied" in way}  # fmt: skip
    if "capped" in way:
        model: Any = Gemma2ForCausalLM(Gemma2Config(**sizes, head_dim=8, final_logit_softcapping=3.0, pad_token_id=0))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    if "LoRA" in way:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    return model.eval()


def parallel(way: str) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model = make(way)
    if way == "ddp":
        return DistributedDataParallel(model, broadcast_buffers=False)
    inner = model.get_base_model() if "LoRA" in way else model
    for layer in inner.model.layers:
        fully_shard(layer)
    if "alone" in way:
        fully_shard(inner.lm_head, reshard_after_forward=True)
    return fully_shard(model)


@pytest.fixture(scope="module")
def furthest() -> Iterator[dict[str, list[float]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [spawn.Process(target=work, args=(rank, port, results), daemon=True) for rank in range(2)]
    for worker in workers:
        worker.start()
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(2 * len(WAYS)):
        way, distance = results.get(timeout=60)
        found[way].append(distance)
    yield found
    for worker in workers:
        worker.join(10)
        worker.kill()


@pytest.mark.parametrize("way", WAYS)
def test_gradients_over_two_processes_are_those_of_one(way: str, furthest: dict[str, list[float]]) -> None:
    assert len(furthest[way]) == 2
    assert max(furthest[way]) < 1e-5
