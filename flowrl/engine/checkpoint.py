"""Checkpoints on disk: `checkpoints/step_K/` with a file `checkpoint.json`, written last, that lists all others.

A save goes through phases, each a function here: workers write into a hidden folder and bring it to the disk, the
folder is looked through, renamed, marked, and only then older ones are removed. Broken off anywhere, it leaves the
checkpoints before it as they were, and itself either complete or without its mark.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.batch import Batch
from flowrl.engine.call import Receipt
from flowrl.run_files import CHECKPOINTS, sync_folder, write_text

MARKER = "checkpoint.json"
IN_FLIGHT = "in_flight.pickle"
InFlight = tuple[Sequence[Batch], Sequence[Receipt]]
"""Columns of groups that wait for a batch, and receipts whose metrics are of a later step."""
FORMAT = 1
_PARTIAL = ".partial"


class Incomplete(Exception):
    """A folder is no checkpoint to go on from; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    path: Path
    marker: Mapping[str, Any]
    """What `checkpoint.json` holds."""

    @property
    def step(self) -> int:
        """The last step that it holds."""
        return int(self.marker["step"])

    @property
    def versions(self) -> Mapping[str, int]:
        """Version of the weights of each model."""
        return {str(name): int(version) for name, version in self.marker["versions"].items()}

    @property
    def data(self) -> Mapping[str, Any]:
        """Position in the data, and what identifies the data that it belongs to."""
        found: Mapping[str, Any] = self.marker["data"]
        return found

    def in_flight(self) -> InFlight:
        """What groups in flight had so far."""
        if IN_FLIGHT not in self.marker["files"]:
            return (), ()
        columns, receipts = pickle.loads((self.path / IN_FLIGHT).read_bytes())
        return columns, receipts

    def __str__(self) -> str:
        return f"step {self.step} of {self.path.parents[1]}"


def partial_folder(run: Path, step: int) -> Path:
    """A new folder for a checkpoint to be written in; no attempt that died and is still writing has the same."""
    folder = run / CHECKPOINTS / f".step_{step}-{secrets.token_hex(4)}{_PARTIAL}"
    folder.mkdir(parents=True)
    return folder


def complete(partial: Path, marker: Mapping[str, Any], files: Mapping[str, int]) -> Checkpoint:
    """Make a checkpoint of a folder in which every worker has written its `files` (size by name).

    Raises `OSError`, and `Incomplete` where a file is not there as it was written.
    """
    check_files(partial, files)
    bring_to_disk(partial)
    final = partial.with_name(f"step_{marker['step']}")
    put_in_place(partial, final)
    return mark(final, {"format": FORMAT, **marker, "files": dict(files)})


def write_in_flight(partial: Path, in_flight: InFlight) -> dict[str, int]:
    """Write what groups in flight have so far; the size of the file by its name."""
    with (partial / IN_FLIGHT).open("wb") as file:
        pickle.dump(in_flight, file)
        file.flush()
        os.fsync(file.fileno())
    return {IN_FLIGHT: (partial / IN_FLIGHT).stat().st_size}


def check_files(folder: Path, files: Mapping[str, int]) -> None:
    """Raises `Incomplete` unless all files are there with their sizes."""
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            raise Incomplete(f"it lacks {name}" if found is None else f"{name} has {found:,} of {size:,} bytes")


def bring_to_disk(folder: Path) -> None:
    """The names of its files; workers did so with what is in them."""
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            sync_folder(path)


def put_in_place(partial: Path, final: Path) -> None:
    """Give the folder its name; one of that name is of a save that was broken off."""
    if final.exists():
        remove(final)
    partial.rename(final)
    sync_folder(final.parent)


def mark(folder: Path, marker: Mapping[str, Any]) -> Checkpoint:
    """Write the file that makes the folder a checkpoint."""
    write_text(folder / MARKER, json.dumps(marker, indent=2, ensure_ascii=False, default=str) + "\n")
    return Checkpoint(folder, marker)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its mark first: half removed it must not count as one."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder)


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder. Raises `Incomplete`."""
    if not folder.is_dir():
        raise Incomplete("there is no such folder")
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        found = Checkpoint(folder, marker)
        files = {str(name): int(size) for name, size in marker["files"].items()}
        assert found.step >= 0 and found.versions is not None and found.data is not None
    except FileNotFoundError:
        raise Incomplete(f"it has no {MARKER}: its writing was broken off") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise Incomplete(f"its {MARKER} cannot be read") from None
    if marker.get("format") != FORMAT:
        raise Incomplete(f"it has format {marker.get('format')!r}, and this version reads {FORMAT}")
    check_files(folder, files)
    return found


def is_complete(folder: Path) -> bool:
    """Whether a folder holds a checkpoint to go on from."""
    try:
        read(folder)
    except Incomplete:
        return False
    return True


def folders_of(run: Path) -> Iterator[tuple[int, Path]]:
    """Step and folder of whatever looks like a checkpoint of a run, the latest first."""
    named = ((re.fullmatch(r"step_(\d+)", path.name), path) for path in (run / CHECKPOINTS).glob("step_*"))
    steps = [(int(match[1]), path) for match, path in named if match is not None and path.is_dir()]
    return iter(sorted(steps, reverse=True))


def latest(run: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest complete checkpoint of a run, and what is wrong with those that would be newer."""
    faults = [f"{CHECKPOINTS}/{path.name} is left out: its writing was broken off" for path in _partial_folders(run)]
    for _, path in folders_of(run):
        try:
            return read(path), tuple(faults)
        except Incomplete as fault:
            faults.append(f"{CHECKPOINTS}/{path.name} is left out: {fault}")
    return None, tuple(faults)


def has_saved(run: Path) -> bool:
    """Whether a run has ever completed a checkpoint that is still there, damaged or not."""
    return any((path / MARKER).exists() for _, path in folders_of(run))


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what saves that were broken off have left."""
    num_kept = 0
    for _, path in folders_of(run):
        num_kept += is_complete(path)
        if num_kept > keep or not is_complete(path):
            remove(path)
    for path in _partial_folders(run):
        shutil.rmtree(path, ignore_errors=True)


def drop_after(run: Path, step: int) -> None:
    """Remove the checkpoints of later steps: the run goes on from here, and theirs is another future."""
    for number, path in folders_of(run):
        if number > step:
            remove(path)


def _partial_folders(run: Path) -> list[Path]:
    return sorted((run / CHECKPOINTS).glob(f".step_*{_PARTIAL}"))
