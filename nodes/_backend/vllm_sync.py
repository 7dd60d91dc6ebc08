"""Weights on their way into a vLLM engine: the side of the worker that holds its AsyncLLM.

A bucket is a safetensors file in memory that has no name in any folder: it is gone when both processes have let go of
it, whatever ends them.
"""

from __future__ import annotations

import base64
import os
import re
import tempfile
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from safetensors.torch import save
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.v1.engine.async_llm import AsyncLLM

from flowrl.nodes._backend.engine import Wanted
from flowrl.nodes._backend.transport import this_process
from flowrl.nodes._backend.weights import Bucket, Update, WeightsError, name_of, tensor_of

_TOLD = re.compile(r"Worker failed with error '(.*)', please check the stack trace", re.DOTALL)
"""What vLLM says around an error of its processes."""


class Caller(Protocol):
    """Runs a coroutine on the loop of an AsyncLLM and waits for its end, or for that of vLLM's processes."""

    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any:
        """What it returns."""


class VllmUpdate:
    """The updates of one AsyncLLM."""

    def __init__(self, llm: AsyncLLM, call: Caller) -> None:
        self._llm, self._call = llm, call
        self._opened: dict[str, Any] = {}
        self._left: set[str] | None = None
        """What is still to come; None outside an update."""

    def wants(self) -> Wanted:
        """The type of the model's weights, and the ways to its processes."""
        config = self._llm.vllm_config
        on_cpu = config.device_config.device_type == "cpu"
        transports = ("shm",) if on_cpu else ("shm", "ipc", "nccl")
        name = f"{this_process()}/{id(self)}"
        return Wanted(name_of(config.model_config.dtype), transports, config.parallel_config.world_size, name)

    @property
    def is_whole(self) -> bool:
        """Whether the model has all its weights, the old ones or the new ones."""
        return self._left is None

    def begin(self, update: Update) -> None:
        """Open the way if it is not open, and let the model take itself apart."""
        dtype = self.wants().dtype
        for name, kind in update.manifest.items():
            if "float" in kind.dtype and kind.dtype != dtype:
                raise WeightsError(f"the weight '{name}' is sent as {kind.dtype} to an engine that holds {dtype}")
        self._left = set(update.manifest)
        details = dict(update.details)
        if "rank_offset" in details:
            details["rank_offset"] = details["rank_offset"][self.wants().name]
        opening = {"transport": update.transport, "details": details}
        if self._opened != opening:
            self._do(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(opening)))
            self._opened = opening
        if "ipc" in self.wants().transports and self._call(self._llm.is_sleeping()):
            self._call(self._llm.wake_up(tags=["weights"]))
        self._do(self._llm.start_weight_update())

    def load(self, bucket: Bucket) -> None:
        """Load one bucket."""
        assert self._left is not None, "an update begins first"
        part = {
            "ends": bucket.ends,
            "kinds": {name: (kind.dtype, list(kind.shape)) for name, kind in bucket.kinds.items()},
            "checksums": dict(bucket.checksums),
            "handles": base64.b64encode(bucket.handles).decode(),
        }
        with _file_of(bucket) as path:
            self._do(self._llm.update_weights(WeightTransferUpdateRequest(part | {"path": path})))
        self._left -= set(bucket.kinds)

    def finish(self, version: int) -> None:
        """Put the model together, under this version; what the old weights had computed is forgotten."""
        if self._left:
            raise WeightsError(f"the weight '{min(self._left)}' was announced, but has not come")
        self._do(self._llm.finish_weight_update(weight_version=str(version)))
        # What runs is preempted: the keys and values of its tokens are those of the old weights.
        if not self._call(self._llm.reset_prefix_cache(reset_running_requests=True)):
            raise RuntimeError("vLLM did not reset its prefix cache after the sync")
        found = self._call(self._llm.get_weight_version())
        if found != str(version):
            raise RuntimeError(f"after the sync vLLM has weights of version {found}, not {version}")
        self._left = None

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        """A step of the update, in vLLM's processes; what goes wrong there arrives as text."""
        try:
            self._call(work)
        except Exception as error:
            told = _TOLD.search(str(error))
            raise WeightsError(told[1] if told else str(error)) from error


@contextmanager
def _file_of(bucket: Bucket) -> Iterator[str]:
    """Path of a file in memory with the bucket's tensors; empty for a bucket that carries none."""
    if not bucket.arrays:
        yield ""
        return
    with _open() as file:
        file.write(save({name: tensor_of(array, bucket.kinds[name].dtype) for name, array in bucket.arrays.items()}))
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if isinstance(file.name, int) else str(file.name)


def _open() -> Any:
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("weights"), "wb")
    return tempfile.NamedTemporaryFile()  # where there is no Linux
