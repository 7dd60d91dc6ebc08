"""When a run saves, and how a save goes on beside it: the step waits for the copy to host memory, for no more."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.engine import checkpoint
from flowrl.engine.checkpoint import Checkpoint, Incomplete, InFlight, partial_folder
from flowrl.engine.cluster import Cluster
from flowrl.errors import RunError
from flowrl.schedule.record import Recorder
from flowrl.spec.document import CheckpointSpec

RESCUE_SECONDS = 60.0
"""What a run that failed waits for a save that had begun."""


@dataclass
class Saver:
    """Saves the checkpoints of one run, one at a time."""

    run: Path
    """The run folder."""
    spec: CheckpointSpec
    num_steps: int
    cluster: Cluster
    workers: Sequence[str]
    recorder: Recorder
    about: Mapping[str, Any]
    """What every checkpoint of the run says of it."""
    saved: int = 0
    """Step of the newest complete checkpoint."""
    _due: bool = False
    _changed: bool = False
    _writing: asyncio.Task[None] | None = None

    def is_due(self, step: int, changed: bool) -> bool:
        """Whether to save at the end of a step, which may have `changed` nothing; asked once a step.

        A step whose update was skipped is not saved; the next one that changes something is, in its place.
        """
        self._changed |= changed
        self._due |= step % self.spec.every == 0
        wanted = self._changed and (step == self.num_steps or (self._due and changed))
        if wanted:
            self._due = self._changed = False
        return wanted

    async def save(
        self, step: int, versions: Mapping[str, int], data: Mapping[str, Any], in_flight: InFlight, failed: Failed
    ) -> None:
        """Let every worker copy its state, then write it beside the run, with what the groups `in_flight` have so far.

        Nothing that trains may be running. `failed` takes the error of a save that goes wrong later.
        """
        await self.finish()
        start = time.monotonic()
        try:
            partial = await asyncio.to_thread(partial_folder, self.run, step)
        except OSError as error:
            raise self._error(step, self.run, str(error.strerror or error), 0) from None
        copies = await asyncio.gather(*(self.cluster.save(worker, str(partial)) for worker in self.workers))
        copied = time.monotonic() - start
        marker = {
            **self.about,
            "run": self.run.name,
            "step": step,
            "versions": dict(versions),
            "data": {**self.about["data"], "state": dict(data)},
        }
        self._writing = asyncio.ensure_future(
            self._write(_Save(step, partial, marker, in_flight, sum(copies), start, copied))
        )
        self._writing.add_done_callback(lambda task: _tell(task, failed))

    async def finish(self) -> None:
        """Wait until the last save is on disk. Raises `RunError` where it failed."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def rescue(self) -> None:
        """The run has failed; a save that has begun may still end, and what becomes of it is only noted."""
        if self._writing is None or self._writing.done():
            return
        try:
            async with asyncio.timeout(RESCUE_SECONDS):
                await self.finish()
        except (RunError, TimeoutError) as error:
            self.recorder.note(f"the last checkpoint is not complete: {error}", "warning")

    async def _write(self, save: _Save) -> None:
        written = await asyncio.gather(*map(self.cluster.written, self.workers), return_exceptions=True)
        faults = [fault for fault in written if isinstance(fault, BaseException)]
        try:
            for fault in faults:
                raise fault
            files = {name: size for part in written if isinstance(part, Mapping) for name, size in part.items()}
            if any(save.in_flight):
                files |= await asyncio.to_thread(checkpoint.write_in_flight, save.partial, save.in_flight)
            await asyncio.to_thread(checkpoint.complete, save.partial, save.marker, files)
        except Exception as error:  # of a disk, a network, a worker, or a node whose state cannot be pickled
            raise self._error(save.step, save.partial, _said(error), save.num_bytes) from None
        self.saved = save.step
        size, seconds = _mebibytes(sum(files.values())), time.monotonic() - save.start
        self.recorder.note(
            f"checkpoint of step {save.step}: {size} in {seconds:.2f} s, of which the run waited {save.copied:.2f} s"
        )
        try:
            await asyncio.to_thread(checkpoint.prune, self.run, self.spec.keep)
        except OSError as error:
            self.recorder.note(f"older checkpoints cannot be removed: {error}", "warning")

    def _error(self, step: int, partial: Path, reason: str, num_bytes: int) -> RunError:
        """What to say of a save that failed; what it has written is removed, for the disk may be full."""
        folder = self.run if partial == self.run else partial.parent
        if partial != self.run:
            shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        needed = f" It takes {_mebibytes(num_bytes)}, and {_mebibytes(free)} are free." if num_bytes else ""
        before = f" The checkpoint of step {self.saved} is complete: the same command goes on from it." * bool(
            self.saved
        )
        return RunError(f"the checkpoint of step {step} could not be written to {folder}: {reason}.{needed}{before}")


async def load(found: Checkpoint, cluster: Cluster, workers: Sequence[str]) -> None:
    """Let every worker take its state back. Raises `RunError`, for files may be damaged and yet of the right size."""
    try:
        await asyncio.gather(*(cluster.restore(worker, str(found.path)) for worker in workers))
    except RunError as error:
        fact = (
            f"the checkpoint of {found} cannot be loaded: {error.fact}. If it is damaged, remove {found.path}, and the "
            "same command goes on from the one before"
        )
        raise RunError(fact, worker=error.worker, details=error.details) from None


@asynccontextmanager
async def written_at_the_end(saver: Saver | None) -> AsyncIterator[None]:
    """A run that ends inside waits for the save that still goes on beside it."""
    try:
        yield
        if saver is not None:
            await saver.finish()
    except Exception:
        if saver is not None:
            await saver.rescue()
        raise


Failed = Callable[[BaseException], None]


@dataclass(frozen=True)
class _Save:
    step: int
    partial: Path
    marker: Mapping[str, Any]
    in_flight: InFlight
    num_bytes: int
    """In host memory, of all workers."""
    start: float
    copied: float
    """Seconds that the run waited."""


def _tell(task: asyncio.Task[None], failed: Failed) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        failed(error)


def _said(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    if isinstance(error, Incomplete):
        return f"{error}, as if a worker had written it on another machine; put run.dir where all machines see it"
    return str(error) if isinstance(error, RunError) else f"{type(error).__name__}: {error}"


def _mebibytes(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
