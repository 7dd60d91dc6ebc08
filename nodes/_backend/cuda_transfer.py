"""Weights between GPUs through vLLM's own transfer engines, `ipc` and `nccl`.

Unproven: written against vLLM's interface and never run on a GPU here. What it shares with `shm`, which is proven, is
everything but the way of the tensors: buckets, manifest, loading, the checks of names and checksums.
"""

from __future__ import annotations

import pickle
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowrl.nodes._backend.engine import Wanted
from flowrl.nodes._backend.weights import (
    Bucket,
    Update,
    array_of,
    checksum_of,
    cut,
    gathered,
    kind_of,
    manifest_of,
)


def receiving_engine(
    transport: str, details: Mapping[str, Any], config: Any, vllm_config: Any, device: torch.device, model: Any
) -> Any:
    """vLLM's engine for a transport, opened; it loads what it receives through `model.load_weights`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    kind: Any = WeightTransferEngineFactory._registry[transport]()
    engine = kind(config, vllm_config, device, model)
    engine.init_transfer_engine(engine.parse_init_info(dict(details)))
    return engine


def ipc_buckets(module: nn.Module, dtype: str, bucket_bytes: int, verify: bool, num_ranks: int) -> Iterator[Bucket]:
    """Buckets whose tensors stay on the GPU of each rank, for engines on the same GPUs; all ranks go through them.

    Rank 0's bucket says where each GPU has them. That a bucket is asked for says that the one before has been loaded;
    the last, empty one says it of all.
    """
    from torch.multiprocessing import reductions

    share: Any = reductions.reduce_tensor
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    alive: deque[dict[str, Tensor]] = deque(maxlen=2)
    for tensors, begins in _parts(module, dtype, bucket_bytes, Update({}, "ipc", {"packed": False})):
        alive.append(tensors)
        here = [{gpu: share(tensor)[1]} for tensor in tensors.values()]
        by_name = zip(*_gather(here, num_ranks), strict=True)
        handles = [{key: value for rank in ranks for key, value in rank.items()} for ranks in by_name]
        torch.cuda.synchronize()
        yield _announced(tensors, verify, begins, pickle.dumps(handles))
    yield Bucket({}, {}, ends=True)
    _gather([], num_ranks)  # the other ranks keep their last tensors until rank 0 is asked for no more


class NcclGroup:
    """The trainer, as rank 0, and every process of the engines; opened by the first update."""

    def __init__(self, engines: Sequence[Wanted]) -> None:
        offsets: dict[str, int] = {}
        size = 1
        for wanted in engines:
            offsets[wanted.name] = size
            size += wanted.num_processes
        host = socket.gethostbyname(socket.gethostname())
        with socket.socket() as probe:
            probe.bind((host, 0))
            port = int(probe.getsockname()[1])
        self.details = {"master_address": host, "master_port": port, "world_size": size, "rank_offset": offsets}
        """What engines must know to join; each finds its own offset by its name."""
        self._group: Any = None

    def broadcast(self, tensors: Mapping[str, Tensor]) -> None:
        """Send tensors to all engines, which are loading the bucket that announced them."""
        if self._group is None:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init

            self._group = trainer_init(self.details)
        for tensor in tensors.values():
            self._group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        torch.cuda.synchronize()


def nccl_buckets(
    module: nn.Module, dtype: str, bucket_bytes: int, verify: bool, group: NcclGroup | None
) -> Iterator[Bucket]:
    """Buckets that say what rank 0, which has the group, broadcasts next; ranks of a sharded model help to gather.

    Engines load a bucket while its tensors are on their way: it has been taken when this goes on.
    """
    details = group.details if group is not None else {}
    for tensors, begins in _parts(module, dtype, bucket_bytes, Update({}, "nccl", details)):
        if group is not None:
            yield _announced(tensors, verify, begins)
            group.broadcast(tensors)
    yield Bucket({}, {}, ends=True)


def _parts(
    module: nn.Module, dtype: str, bucket_bytes: int, update: Update
) -> Iterator[tuple[dict[str, Tensor], Update | None]]:
    """The tensors of each bucket; with the first one the update that it begins."""
    manifest = manifest_of(module, dtype)
    begins: Update | None = Update(manifest, update.transport, update.details)
    for names in cut(manifest, bucket_bytes):
        yield gathered(module, names, manifest), begins
        begins = None


def _announced(tensors: Mapping[str, Tensor], verify: bool, begins: Update | None, handles: bytes = b"") -> Bucket:
    kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
    checksums = {name: checksum_of(array_of(tensor)) for name, tensor in tensors.items()} if verify else {}
    return Bucket(kinds, {}, checksums, handles, begins)


def _gather(mine: list[Any], num_ranks: int) -> list[list[Any]]:
    """The lists of all ranks."""
    everywhere: list[Any] = [mine] * num_ranks
    if num_ranks > 1:
        torch.distributed.all_gather_object(everywhere, mine)
    return everywhere
