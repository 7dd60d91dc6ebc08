"""Puts away what Ray's processes leave behind when a run ends, above all when it is killed.

A process of its own, in a session of its own, that waits for the end of the run's process. Killed processes cannot
clean up, and Ray kills the helpers of Python that would: names of shared memory stay in /dev/shm, hundreds of
megabytes for an engine, and some of Ray's own processes stay for a minute.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import psutil

FOLDER = "/dev/shm"
PREFIXES = ("psm_", "sem.", "vllm_dist_")
"""Of the names that Python's `SharedMemory` and semaphores, and vLLM's split models, make up."""
LOOK_SECONDS = 0.5
"""How often the processes are looked at; what they make later than that before the end is missed."""
GRACE_SECONDS = 5.0
"""How long the processes may take to end by themselves."""


def start_sweeper() -> subprocess.Popen[bytes]:
    """Start it, before Ray; it sets to work when its standard input is closed, as it is when this process dies."""
    command = [sys.executable, "-m", "flowrl.engine.sweeper", str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def shared_memory(pid: int) -> set[Path]:
    """Files of the shared memory that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:  # it has ended, or this system has no such file
        return set()
    # By number: a semaphore is mapped under another name than it gets.
    mapped = {int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if FOLDER in line}
    named = [entry for entry in os.scandir(FOLDER) if entry.name.startswith(PREFIXES)]
    return {Path(entry) for entry in named if entry.inode() in mapped}


def main(pid: int) -> None:
    """Watch the raylets that a process has started, and their descendants, until standard input ends."""
    roots: set[psutil.Process] = set()
    processes: set[psutil.Process] = set()
    memory: set[Path] = set()
    ended = False
    while not ended:
        ended = bool(select.select([sys.stdin], [], [], LOOK_SECONDS)[0])
        roots |= _raylets(pid)
        processes = {each for each in processes.union(*map(_family, roots)) if each.is_running()}
        memory = memory.union(*(shared_memory(each.pid) for each in processes))
    for left in psutil.wait_procs(processes, timeout=GRACE_SECONDS)[1]:
        left.kill()
    for path in memory:
        path.unlink(missing_ok=True)


def _raylets(pid: int) -> set[psutil.Process]:
    try:
        return {child for child in psutil.Process(pid).children() if child.name() == "raylet"}
    except psutil.NoSuchProcess:
        return set()


def _family(process: psutil.Process) -> set[psutil.Process]:
    try:
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    main(int(sys.argv[1]))
