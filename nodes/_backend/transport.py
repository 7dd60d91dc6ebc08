"""Which way weights take, and the stream of buckets on it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from flowrl.node import Context
from flowrl.nodes._backend.engine import Wanted
from flowrl.nodes._backend.models import shared
from flowrl.nodes._backend.weights import Bucket, WeightsError, buckets, is_sharded


@dataclass(frozen=True)
class Receiver:
    """A worker that weights are sent to."""

    process: str
    """The same for what shares a worker, and with it a device."""
    engines: tuple[Wanted, ...]


def this_process() -> str:
    """Name of this process among all machines."""
    return f"{socket.gethostname()}/{os.getpid()}"


def stream(
    context: Context,
    module: nn.Module,
    receivers: Sequence[Receiver],
    transport: str,
    bucket_bytes: int,
    dtype: str,
    verify: bool,
) -> Iterator[Bucket]:
    """The buckets that a rank of the training pool sends: rank 0 all of them, the others none.

    `dtype` is what engines get that take any.
    """
    chosen, dtype = choose(transport, receivers, context.device), wanted_dtype(receivers) or dtype
    if context.rank > 0 and chosen != "ipc" and not is_sharded(module):
        return
    if chosen == "shm":
        parts = buckets(module, dtype, bucket_bytes, verify)
    else:
        from flowrl.nodes._backend.cuda_transfer import NcclGroup, ipc_buckets, nccl_buckets

        if chosen == "ipc":
            parts = ipc_buckets(module, dtype, bucket_bytes, verify, context.num_ranks)
        else:
            engines = [wanted for receiver in receivers for wanted in receiver.engines]
            group = shared(context, "nccl", lambda: NcclGroup(engines)) if context.rank == 0 else None
            parts = nccl_buckets(module, dtype, bucket_bytes, verify, group)
    for part in parts:
        if context.rank == 0:
            yield part


def choose(transport: str, receivers: Sequence[Receiver], device: str) -> str:
    """The transport from a device: the one that is asked, or the fastest that there is for `auto`.

    Whether a worker is shared is asked of this one: pools share all their workers, or none. Raises `WeightsError` where
    an engine cannot take the one that is asked.
    """
    engines = [wanted for receiver in receivers for wanted in receiver.engines]
    best = "ipc" if this_process() in {receiver.process for receiver in receivers} else "nccl"
    # The engines of one worker get a bucket in turn, but join a group together.
    able = (
        device != "cpu"
        and all(best in wanted.transports for wanted in engines)
        and all(len(each.engines) < 2 for each in receivers)
    )
    chosen = (best if able else "shm") if transport == "auto" else transport
    for wanted in engines:
        if chosen not in wanted.transports:
            raise WeightsError(
                f"an engine cannot take weights by transport {chosen}, only by {', '.join(wanted.transports)}: "
                "write transport: auto"
            )
    return chosen


def wanted_dtype(receivers: Sequence[Receiver]) -> str:
    """The type of the engines' weights; empty where any will do."""
    found = sorted({wanted.dtype for receiver in receivers for wanted in receiver.engines if wanted.dtype})
    if len(found) > 1:
        raise WeightsError(
            f"engines of one model hold weights of types {' and '.join(found)}, and a sync sends one: give all the same"
        )
    return found[0] if found else ""
