"""A model on the workers of a pool: whole on each (DDP), or a share of every weight on each (FSDP2).

torch's own wrappers, for `parallel` is a setting of a model and not of a process; see `docs/decisions/`. Both average
gradients over ranks, and both wait for each other: every rank calls a model equally often, with gradients or without.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from flowrl.model import ModelSpec
from flowrl.node import Context


def will_be_sharded(spec: ModelSpec, context: Context) -> bool:
    """Whether a model of this worker is to be spread over the ranks of its pool."""
    return spec.parallel == "fsdp2" and context.num_ranks > 1


def compute_in(module: nn.Module, spec: ModelSpec, context: Context) -> None:
    """Let a whole model compute in the type of its `mixed_precision`; a sharded one is told by `shard`."""
    if spec.mixed_precision is None or will_be_sharded(spec, context):
        return
    device, dtype = context.device.partition(":")[0], getattr(torch, spec.mixed_precision)
    inside = ExitStack()

    def enter(*_: object) -> None:
        inside.enter_context(torch.autocast(device, dtype))

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda *_: inside.close(), always_call=True)


def shard(module: nn.Module, spec: ModelSpec, context: Context) -> None:
    """Spread the weights over the ranks, in place: layer by layer, so that one layer at a time is gathered."""
    join(context)
    mesh = init_device_mesh(context.device.partition(":")[0], (context.num_ranks,))
    narrow = None if spec.mixed_precision is None else getattr(torch, spec.mixed_precision)
    # Gradients are added up in the type of the weights, whatever type they were computed in.
    policy = MixedPrecisionPolicy() if narrow is None else MixedPrecisionPolicy(narrow, torch.float32)
    layers = set(getattr(module, "_no_split_modules", None) or ())
    for part in [part for part in module.modules() if type(part).__name__ in layers]:
        fully_shard(part, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)


def copied(module: nn.Module, context: Context) -> nn.Module:
    """The model to call so that gradients are averaged over the ranks; all start from the weights of rank 0."""
    join(context)
    # Buffers never change here, so nothing is gained by sending them with every forward pass.
    return DistributedDataParallel(module, broadcast_buffers=False)


def join(context: Context) -> None:
    """Join the process group of the worker's pool (`MASTER_ADDR`, `RANK`, ...), once."""
    if distributed.is_initialized():
        return
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    assert world_size == context.num_ranks, f"WORLD_SIZE is {world_size} in a pool of {context.num_ranks} ranks"
    if context.device != "cpu":  # unproven
        torch.cuda.set_device(context.device)
    distributed.init_process_group("gloo" if context.device == "cpu" else "cpu:gloo,cuda:nccl")


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Passes inside leave nothing behind: no graph, and no weights gathered that the next update would make stale."""
    with torch.no_grad():
        yield
    if isinstance(model, FSDPModule):
        model.reshard()


@contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Backward passes inside add to each rank's own gradients; the ranks are added up by the next one outside.

    Sharded models do that each time: a rank has no room for the gradients of all weights.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    else:
        yield


def sum_over_ranks(value: Tensor) -> Tensor:
    """The values of all ranks of the pool added up, in place: the same on each."""
    if distributed.is_initialized():
        distributed.all_reduce(value)
    return value


def move(module: nn.Module, optimizer: Optimizer | None, device: str) -> None:
    """Take weights and optimizer to host memory, or back to the device; between steps there is no gradient. Unproven.

    Tensors stay the same objects, which optimizers and data parallelism hold on to.
    """
    if isinstance(module, FSDPModule):
        module.to(device)
    else:
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.to(device)
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim:  # counters of steps are on the host always
                state[name] = value.to(device)
