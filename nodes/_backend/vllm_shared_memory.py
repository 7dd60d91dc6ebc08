"""The memory that vLLM's processes share, without names that outlive them.

Python's shared memory is a file in /dev/shm, several hundred megabytes for an engine. Who is killed leaves it behind:
a worker at the end of every run, everybody when the machine's owner loses patience. A file that has lost its name
lives exactly as long as the processes that hold it.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

FOLDER = "/dev/shm"
PREFIX = "psm_"
"""Of the names that Python's `SharedMemory` makes up."""


def forget_shared_memory() -> None:
    """Take the names from the memory that this process and its descendants hold; call it when all have attached."""
    process = psutil.Process()
    for each in (process, *process.children(recursive=True)):
        for name in _held_by(each.pid):
            Path(FOLDER, name).unlink(missing_ok=True)


def _held_by(pid: int) -> set[str]:
    """Names of the shared memory that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:  # it has ended, or this system has no such file
        return set()
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if f"{FOLDER}/{PREFIX}" in line)
    return {os.path.basename(path.removesuffix(" (deleted)")) for path in paths}
