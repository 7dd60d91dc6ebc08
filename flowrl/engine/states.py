"""What a worker remembers: the states of its nodes and its random generators, to the disk and back.

The state of an update is one for all ranks of its pool, sharded or not: `torch.distributed.checkpoint` writes each part
once and lets another number of ranks read it. Any other node has one on each worker, in a file of its own.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import sys
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.engine.call import WorkerSetup
from flowrl.node import Node


class States:
    """The states of the nodes of one worker, but for those that score rows in processes of their own."""

    def __init__(self, setup: WorkerSetup, nodes: Mapping[str, Node], others: Collection[str]) -> None:
        self._setup, self._all, self._others = setup, nodes, others
        self._group: Any = None
        self._writing: Future[dict[str, int]] | None = None

    @property
    def _nodes(self) -> dict[str, Node]:
        return {name: node for name, node in self._all.items() if name not in self._others}

    def copy(self, folder: str) -> int:
        """Copy everything to host memory and begin to write it into a folder; the bytes of its tensors.

        All ranks of a pool call this in step.
        """
        assert self._writing is None, "the save before was waited for"
        shared = {name: node.state() for name, node in self._nodes.items() if node.weights == "updates"}
        own = {name: node.state() for name, node in self._nodes.items() if node.weights != "updates"}
        shared, own = ({name: state for name, state in some.items() if state} for some in (shared, own))
        shared, own = on_host(shared), on_host(own)
        group = self._ranks() if shared else None
        if group is None and self._setup.rank > 0:
            shared = {}  # ranks without a process group: it is the same on each
        kept = {f"nodes/{name}/{self._setup.rank}.pickle": state for name, state in own.items()}
        kept[f"random/{self._setup.pool}-{self._setup.rank}.pickle"] = random_state()
        pool = ThreadPoolExecutor(1, "flowrl-checkpoint")
        self._writing = pool.submit(self._write, Path(folder), kept, shared, group)
        pool.shutdown(wait=False)
        return sum(map(num_bytes, shared.values())) + sum(map(num_bytes, own.values()))

    def written(self) -> dict[str, int]:
        """Wait until all is on disk; the size of each file of this worker. Raises `OSError`."""
        assert self._writing is not None, "it was begun"
        writing, self._writing = self._writing, None
        return writing.result()

    def _write(self, folder: Path, kept: Mapping[str, Any], shared: Mapping[str, Any], group: Any) -> dict[str, int]:
        sizes = {name: _write_pickle(folder / name, value) for name, value in kept.items()}
        for name, state in shared.items():
            from flowrl.engine.sharded import write

            written = write(folder / "nodes" / name, state, self._setup.rank, group)
            sizes |= {f"nodes/{name}/{file}": size for file, size in written.items()}
        return sizes

    def restore(self, folder: str) -> None:
        """Take back what a checkpoint holds for this worker; all ranks of a pool call this in step.

        A node without a state in it starts anew; of a pool that was smaller, a further rank takes that of another.
        """
        for name, node in self._nodes.items():
            place = Path(folder) / "nodes" / name
            if not place.is_dir():
                continue
            if node.weights == "updates":
                from flowrl.engine.sharded import read

                node.load_state(read(place, node.state(), self._ranks()))
            else:
                saved = sorted(place.glob("*.pickle"), key=lambda path: int(path.stem))
                node.load_state(_read_pickle(saved[self._setup.rank % len(saved)]))
        generators = Path(folder) / "random" / f"{self._setup.pool}-{self._setup.rank}.pickle"
        if generators.is_file():
            set_random_state(_read_pickle(generators))

    def _ranks(self) -> Any:
        """A process group of the pool's ranks that only saving uses, beside the training; None for a single one."""
        if self._group is None and self._setup.num_ranks > 1:
            import torch.distributed

            if torch.distributed.is_initialized():
                self._group = torch.distributed.new_group(backend="gloo")
        return self._group


def tensors_of(state: Any) -> Iterator[Any]:
    """All tensors in nested mappings and sequences."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from tensors_of(value)


def num_bytes(state: Any) -> int:
    """Of its tensors, as far as they lie on this worker."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors_of(state))
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def on_host(state: Any) -> Any:
    """A copy that nothing changes any more, its tensors in host memory."""
    if "torch" not in sys.modules:
        return copy.deepcopy(state)
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    plainly = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    return DefaultStager(plainly).stage(state)


def random_state() -> dict[str, Any]:
    """The state of every random generator of the process."""
    found: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    if (torch := sys.modules.get("torch")) is not None:
        found["torch"] = torch.get_rng_state()
        if torch.cuda.is_available():
            found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Go on where the generators were."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if (torch := sys.modules.get("torch")) is not None and "torch" in state:
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available() and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"])


def _write_pickle(path: Path, value: Any) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        pickle.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _read_pickle(path: Path) -> Any:
    with path.open("rb") as file:
        return pickle.load(file)
