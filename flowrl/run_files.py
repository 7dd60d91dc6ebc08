"""A run as its folder tells it: its name, how it ended, and whether it is still going on.

`run.json` holds one object; `attempts` has an entry for the start of the run and for each time that it was resumed. The
process that writes into a run folder holds a lock on `run.lock`, which the system takes back however the process ends.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TextIO

RUN_FILE, LOCK_FILE, CHECKPOINTS = "run.json", "run.lock", "checkpoints"

State = Literal["running", "finished", "failed", "interrupted"]
"""How a run ended; `running` is also what a killed one leaves behind."""


@dataclass(frozen=True)
class Attempt:
    """One try at a run."""

    started: str
    """Local time, ISO 8601."""
    after_step: int = 0
    """The step of the checkpoint that it goes on from; 0 at the start of a run."""
    host: str = ""
    process: int = 0
    status: State = "running"
    ended: str = ""


@dataclass(frozen=True)
class RunInfo:
    """What `run.json` says."""

    name: str
    """Name of the pipeline."""
    settings: str = ""
    """Digest of all settings that must be the same where a run goes on by itself."""
    nodes: tuple[str, ...] = ()
    """The nodes that run: with `--to-nodes`, fewer than the document has."""
    attempts: tuple[Attempt, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether the last attempt did all steps that it was to do."""
        return bool(self.attempts) and self.attempts[-1].status == "finished"

    def resumed(self, after_step: int) -> RunInfo:
        """With one more attempt, that of this process."""
        return replace(self, attempts=(*self.attempts, Attempt(_now(), after_step, socket.gethostname(), os.getpid())))

    def ended(self, status: State) -> RunInfo:
        """With the end of the last attempt."""
        last = replace(self.attempts[-1], status=status, ended=_now())
        return replace(self, attempts=(*self.attempts[:-1], last))


def read_info(folder: Path) -> RunInfo | None:
    """What a run folder says of its run; None where it is none, or cannot be read."""
    try:
        data = json.loads((folder / RUN_FILE).read_text(encoding="utf-8"))
        attempts = tuple(Attempt(**one) for one in data["attempts"])
        return RunInfo(data["name"], data["settings"], tuple(data["nodes"]), attempts)
    except (OSError, ValueError, TypeError, LookupError):
        return None


def write_info(folder: Path, info: RunInfo) -> None:
    """Replace `run.json`."""
    write_text(folder / RUN_FILE, json.dumps({"format": 1, **asdict(info)}, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there as a whole or, when that is broken off, as it was before."""
    with _replaced(path) as file:
        file.write(text)


@contextmanager
def _replaced(path: Path) -> Iterator[TextIO]:
    """A file to write, which takes the place of the one at `path` when it is on the disk."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def attempted(folder: Path, run: RunInfo, after_step: int) -> Iterator[None]:
    """Hold the run folder while a run goes on inside, and say in `run.json` how it ends. Raises `StillRunning`."""
    with locked(folder):
        before = read_info(folder)
        info = replace(run, attempts=before.attempts if before is not None else ()).resumed(after_step)
        status: State = "failed"
        with suppress(OSError):  # of a full disk; those who write more say so
            write_info(folder, info)
        try:
            yield
            status = "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            with suppress(OSError):
                write_info(folder, info.ended(status))


class StillRunning(Exception):
    """Another process writes into the run folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. Raises `StillRunning`."""
    import fcntl  # not on every system on which pipelines are checked

    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StillRunning(folder.name) from None
        yield
    finally:
        os.close(descriptor)


def is_running(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder."""
    try:
        with locked(folder):
            return False
    except StillRunning:
        return True
    except OSError:
        return False


def named_run(run: str, root: str) -> Path | None:
    """The folder of a run that is given by its path, or by its name among the runs of `root`; None if there is none.

    A folder of one of its checkpoints stands for the run, too.
    """
    for path in (Path(run).expanduser(), Path(root) / run):
        for folder in (path, path.parent.parent):
            if run and read_info(folder) is not None and (folder == path or path.parent.name == CHECKPOINTS):
                return folder
    return None


def runs_of(name: str, root: str) -> list[tuple[Path, RunInfo]]:
    """All runs of a pipeline, the one that was started or resumed last first."""
    every = ((file.parent, read_info(file.parent)) for file in Path(root).glob(f"*/{RUN_FILE}"))
    found = [(folder, info) for folder, info in every if info is not None and info.name == name and info.attempts]
    return sorted(found, key=lambda run: (run[1].attempts[-1].started, run[0].name), reverse=True)


def known_runs(root: str) -> Sequence[str]:
    """Names of the runs of a folder, for messages."""
    with suppress(OSError):
        return sorted(file.parent.name for file in Path(root).glob(f"*/{RUN_FILE}") if read_info(file.parent))
    return []


def cut_records(folder: Path, last_step: int) -> None:
    """Leave in the records of a run what is of steps up to this one: an attempt went on, and was lost."""
    for name in ("metrics.jsonl", "events.jsonl"):
        _cut_lines(folder / name, last_step)
    for file in (folder / "samples").glob("*.parquet"):
        numbers = re.findall(r"\d+", file.stem)
        if numbers and int(numbers[-1]) > last_step:
            file.unlink()


def _cut_lines(path: Path, last_step: int) -> None:
    """Lines of JSON objects with a `step`; one whose writing was broken off goes, too."""
    if not path.is_file():
        return
    # Not splitlines: a text of a model may hold other line ends, which JSON does not escape.
    with path.open(encoding="utf-8", errors="surrogateescape", newline="\n") as lines, _replaced(path) as kept:
        kept.writelines(line for line in lines if line.endswith("\n") and _step(line) <= last_step)


def _step(line: str) -> float:
    try:
        found: Any = json.loads(line)["step"]
        return int(found)
    except (ValueError, LookupError, TypeError):
        return float("inf")


def _now() -> str:
    return datetime.now().isoformat(timespec="microseconds")
