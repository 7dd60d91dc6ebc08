"""Nested state whose tensors may be sharded, by `torch.distributed.checkpoint`.

Any number of ranks reads what any other number has written.

The nesting itself, with all values that are no tensors, is one pickled object in which keys stand for the tensors. So
every Python structure comes back as it was, and each tensor is read into the part of it that a rank has.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

STRUCTURE = "structure"
# A single worker needs no process group, and is not warned that it has none.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class Leaf(NamedTuple):
    """Stands for a tensor in the pickled structure."""

    key: str


def write(folder: Path, state: Any, rank: int, group: Any) -> dict[str, int]:
    """Write a state that all ranks of the group have together; the size of each file of this rank.

    Without a group it is that of a single worker. Raises `OSError`.
    """
    tensors: dict[str, Tensor] = {}
    structure = _without_tensors(state, "state", tensors)
    whole: dict[str, Any] = {STRUCTURE: pickle.dumps(structure), **tensors}
    writer = FileSystemWriter(folder, sync_files=True)
    try:
        save(whole, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _as_os_error(_cause(error)) from None
    names = [path.name for path in folder.glob(f"__{rank}_*")] + [".metadata"] * (rank == 0)
    return {name: (folder / name).stat().st_size for name in names}


def read(folder: Path, own: Any, group: Any = None) -> Any:
    """The state in a folder; a tensor that `own` has in the same place and shape is filled, and so keeps its sharding.

    All ranks of the group read together.
    """
    reader = FileSystemReader(folder)
    targets: dict[str, Tensor] = {}
    _without_tensors(own, "state", targets)
    found: dict[str, Any] = {}
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            found[key] = None
            continue
        target = targets.get(key)
        fits = target is not None and target.shape == saved.size
        found[key] = target if fits else torch.empty(saved.size, dtype=saved.properties.dtype)
    try:
        load(found, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise _cause(error) from None
    return _with_tensors(pickle.loads(found[STRUCTURE]), found)


def _without_tensors(state: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """The state with a `Leaf` in the place of each tensor, which is put into `tensors`."""
    if isinstance(state, Tensor):
        tensors[key] = state
        return Leaf(key)
    if isinstance(state, Mapping):
        return {name: _without_tensors(value, f"{key}/{name}", tensors) for name, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(_without_tensors(value, f"{key}/{place}", tensors) for place, value in enumerate(state))
    return state


def _with_tensors(structure: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(structure, Leaf):
        return tensors[structure.key]
    if isinstance(structure, dict):
        return {name: _with_tensors(value, tensors) for name, value in structure.items()}
    if type(structure) in (list, tuple):
        return type(structure)(_with_tensors(value, tensors) for value in structure)
    return structure


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank where something did."""
    return next(iter(error.failures.values()))[0]


def _as_os_error(error: BaseException) -> BaseException:
    """What the system has said of a file that cannot be written; torch says instead at which byte it noticed."""
    step: BaseException | None = error
    while step is not None and not isinstance(step, OSError):
        step = step.__cause__ or step.__context__
    if step is None and isinstance(error, RuntimeError):
        return OSError(f"a file could not grow, as on a full disk ({str(error).splitlines()[0]})")
    return step or error
