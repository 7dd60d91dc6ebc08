"""Weight transfer inside vLLM's processes: what arrives by shared memory, `ipc` or `nccl` is loaded and looked at here.

Registered with vLLM by `vllm_plugin`. Tensors come from shared memory, or from vLLM's own engines for CUDA; those load
into the model through this class, so that whatever the way, no weight is skipped, missing or altered in silence.
"""

from __future__ import annotations

import base64
import pickle
import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from flowrl.nodes._backend.loading import require_same
from flowrl.nodes._backend.vllm_held import forget_half_an_update, held_weights, incomplete, pack_again, ties
from flowrl.nodes._backend.weights import Kind, WeightsError, array_of, checksum_of, kind_of


@dataclass
class Opening(WeightTransferInitInfo):
    """What the two sides agree on before the first update."""

    transport: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Part(WeightTransferUpdateInfo):
    """One bucket."""

    kinds: dict[str, tuple[str, list[int]]]
    """Type and shape of each tensor."""
    checksums: dict[str, str] = field(default_factory=dict)
    path: str = ""
    """A safetensors file with the tensors (`shm`)."""
    handles: str = ""
    """Where the tensors are on the device (`ipc`): pickled, in base64."""
    ends: bool = False
    """This is the last bucket."""


class Transfer(WeightTransferEngine[Opening, Part]):
    """See the module docstring."""

    init_info_cls = Opening
    update_info_cls = Part

    def init_transfer_engine(self, init_info: Opening) -> None:
        """Open the way that weights will take."""
        self._delegate: Any = None
        if init_info.transport != "shm":
            from flowrl.nodes._backend.cuda_transfer import receiving_engine

            self._delegate = receiving_engine(
                init_info.transport, init_info.details, self.config, self.vllm_config, self.device, self
            )

    def start_weight_update(self) -> None:
        """From here on the model is in parts, until the last bucket."""
        forget_half_an_update(self.model)
        finalize_layerwise_reload(self.model, self.model_config)  # does nothing where no update broke off
        self._kinds: dict[str, Kind] = {}
        self._checksums: dict[str, str] = {}
        self._ties = ties(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load one bucket. Raises `WeightsError` for what does not fit, is missing, or is not what was sent."""
        part = self.parse_update_info(update_info)
        self._checksums |= part.checksums
        if part.kinds:
            self.receive_weights(part)
        if part.ends:
            self._put_together()
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """The last bucket has done it: after what goes wrong there vLLM can begin another update, here it could not."""

    def receive_weights(self, update_info: Part) -> None:
        """Take the tensors from where they are."""
        if self._delegate is None:
            with safe_open(update_info.path, framework="pt") as file:
                self.load_weights((name, file.get_tensor(name)) for name in update_info.kinds)
            return
        kinds = update_info.kinds
        names, dtypes, shapes = list(kinds), [kind[0] for kind in kinds.values()], [kind[1] for kind in kinds.values()]
        given: dict[str, Any] = {"names": names, "dtype_names": dtypes, "shapes": shapes}
        if update_info.handles:
            given["ipc_handles"] = pickle.loads(base64.b64decode(update_info.handles))
        self._delegate.receive_weights(self._delegate.parse_update_info(given))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load tensors into the model, as vLLM's own engines do with theirs."""
        tensors = dict(weights)
        for name, tensor in tensors.items():
            if name in self._checksums:
                digest = checksum_of(array_of(tensor))
                require_same(name, self._checksums[name], digest, "what the engine received as")
        self._kinds |= {name: kind_of(tensor) for name, tensor in tensors.items()}
        current = ""

        def each() -> Iterator[tuple[str, Tensor]]:
            nonlocal current
            for current in tensors:
                yield current, tensors[current]

        with _Reads(tensors) as reads:
            try:
                self.model.load_weights(each())
            except Exception as error:
                kind = self._kinds.get(current, "")
                why = textwrap.shorten(str(error), 200)  # vLLM lists every parameter there is
                raise WeightsError(f"the engine's model does not take '{current}', {kind}: {why}") from error
        if unread := reads.unread():
            raise WeightsError(f"the weight '{unread[0]}' was sent, but the engine's model took nothing of it")

    def _put_together(self) -> None:
        missing = incomplete(self.model, self._kinds, self._ties)
        if missing:
            raise WeightsError(f"the engine's weight '{missing[0]}' was not sent")
        finalize_layerwise_reload(self.model, self.model_config)
        pack_again(self.model, self._ties)
        if self._checksums:
            for name, copies in held_weights(self.model, self._kinds, self._ties):
                for digests in copies:
                    if self._checksums[name] not in digests:
                        require_same(name, self._checksums[name], digests[0])

    def shutdown(self) -> None:
        """Close the way."""
        if getattr(self, "_delegate", None) is not None:
            self._delegate.shutdown()


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which of some tensors are copied from while this is entered: loaders skip what they do not know."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = sorted((tensor.data_ptr(), name) for name, tensor in tensors.items() if tensor.numel())
        self._starts = [start for start, _ in self._names]
        self._ends = [tensors[name].data_ptr() + tensors[name].nbytes for _, name in self._names]
        self._unread = dict.fromkeys(name for name, tensor in tensors.items() if tensor.numel())

    def unread(self) -> list[str]:
        """The names of those that were not."""
        return list(self._unread)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        # Of a tensor that is split, such as a small vocabulary, a process may have to take no row at all.
        takes_nothing = func is torch.ops.aten.slice.Tensor and not found.numel()
        if func in _COPIES or takes_nothing:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if not source.is_meta and source.numel():
                position = bisect_right(self._starts, source.data_ptr()) - 1
                if position >= 0 and source.data_ptr() < self._ends[position]:
                    self._unread.pop(self._names[position][1], None)
        return found


_COPIES = frozenset({torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default})
