"""Model FLOPs utilization of an update: the operations that the model needs, over what the devices could do meanwhile.

A forward pass is counted as `flowrl plan` counts it, each distinct prompt once; the backward pass costs as much for the
activations, and as much again for the weights that train (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, appendix B).
What is computed twice, such as with gradient checkpointing, is not counted twice. Not proven on CUDA.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from flowrl.graph.sizes.architecture import Architecture, from_config
from flowrl.graph.sizes.flops import forward_flops
from flowrl.metrics import metric
from flowrl.node import Context
from flowrl.nodes._backend.peaks import peak_of
from flowrl.nodes._backend.value_head import ValueHead
from flowrl.rows import Jagged


@contextmanager
def utilization(context: Context, module: nn.Module, prompts: Jagged, responses: Jagged) -> Iterator[None]:
    """Report `throughput/mfu` of the update of these rows inside the block, by all ranks together.

    Nothing on a CPU, on a device whose peak is unknown, or for a model whose operations are.
    """
    start = time.perf_counter()
    yield
    peak = peak_of(torch.cuda.get_device_name()) if context.device.startswith("cuda") else None
    if peak is not None and context.rank == 0:
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        flops = update_flops(module, prompts, responses)
        if flops is not None:
            metric("throughput/mfu", flops, seconds * peak * context.num_ranks)


def update_flops(module: nn.Module, prompts: Jagged, responses: Jagged) -> float | None:
    """Operations of a forward and a backward pass over these rows; None where the architecture is not known."""
    architecture = from_config(getattr(module, "config").to_dict())  # noqa: B009
    if not isinstance(architecture, Architecture):
        return None
    if any(isinstance(part, ValueHead) for part in module.modules()):
        architecture = architecture.with_value_head()
    distinct = {row.tobytes(): len(row) for row in prompts}
    once, prompt, fed = np.array(list(distinct.values())), prompts.lengths, np.maximum(responses.lengths - 1, 0)
    attended = (once * (once + 1) / 2).sum() + (fed * prompt + fed * (fed + 1) / 2).sum()
    tokens, logits = int(once.sum() + fed.sum()), int(responses.lengths.sum())
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    trained = sum(size for size, trains in sizes if trains) / sum(size for size, _ in sizes)
    return (2 + trained) * forward_flops(architecture, tokens, float(attended), logits)
