"""From a checked pipeline to a running one: data, machine, recorders, workers, loop, and an orderly end."""

from __future__ import annotations

import asyncio
import io
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl.data.stream import Prompt, PromptStream
from flowrl.engine.cluster import Cluster
from flowrl.engine.local import LocalCluster
from flowrl.engine.loop import Loop
from flowrl.engine.setup import accelerators_here, num_cores, worker_setups
from flowrl.errors import PipelineError, Problem, RunError
from flowrl.graph.checks.weights import refused_placements
from flowrl.graph.plan import Plan
from flowrl.graph.show.draw import as_mermaid
from flowrl.loading import Notes, load_prompts, load_validation
from flowrl.resume import NEW, SavePlan, Start, about, data_identity, run_info, where_to_start
from flowrl.run_files import StillRunning, attempted
from flowrl.spec.read import Reading
from flowrl.track import Recorders, RunFolder, make_recorders, missing_package
from flowrl.track.history import History

LOCAL_NOTE = (
    "--local: one worker a pool, on the CPU, nodes one at a time in this process; nothing overlaps, and a row that "
    "never returns, and what rows have started, cannot be ended"
)


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    """Where its records are."""
    metrics: tuple[Mapping[str, float], ...]
    """One mapping for each step."""
    before_training: Mapping[str, float]
    """What evaluations with `before_training` have measured; empty without one."""


def launch(
    plan: Plan,
    reading: Reading,
    resolved: str,
    *,
    local: bool,
    address: str | None,
    quiet: bool,
    resume: str | None = None,
) -> Result:
    """Run a plan to its end, from the checkpoint of the run to `resume` on.

    Raises `PipelineError` before anything starts, `RunError` when the run fails.
    """
    refuse_unavailable(plan, reading, accelerators_here(local, address), address)
    if local:
        plan = replace(plan, pools={name: replace(pool, workers=1) for name, pool in plan.pools.items()})
    elif address is None:
        require(plan, reading, {"CPU": float(num_cores())})
    start = where_to_start(plan, reading, resolved, resume)
    notes = Notes()
    prompts, validation = load_prompts(plan, reading, notes), load_validation(plan, reading, notes)
    with run_folder(plan, reading, resolved, start) as folder:
        history = History(start.metrics())
        recorder = make_recorders(
            plan.document.tracking, folder, name=plan.document.name, resolved=resolved,
            params=plan.document.model_dump(), graph=as_mermaid(plan), stream=io.StringIO() if quiet else None,
            resumed_after=None if start.folder is None else start.last_kept,
        )  # fmt: skip
        for warning in plan.warnings:
            recorder.note(warning.render(), "warning")
        notes.send_to(recorder.note)
        identity = data_identity(plan) if plan.document.checkpoint or start.checkpoint else {}
        start.tell(recorder.note)
        start.place_in_data(identity, prompts, recorder.note)
        recorder.add(history)
        save = SavePlan(folder.path, {**about(plan), "data": identity}, start.checkpoint)
        with signals_restored():
            run_recorded(plan, reading, prompts, validation, recorder, save, local=local, address=address)
    return Result(folder.path, tuple(history.metrics), history.before_training)


def rehearse(plan: Plan, reading: Reading, *, local: bool, address: str | None, start: Start = NEW) -> str:
    """What a run would find: raises what `launch` would before it starts workers, else says how the pools fit, and
    what the data gives.

    With an address, the cluster there is asked; nothing is placed on it.
    """
    refuse_unavailable(plan, reading, accelerators_here(local, address), address)
    notes = Notes()
    start.tell(lambda text, _: notes(text))
    load_prompts(plan, reading, notes)
    load_validation(plan, reading, notes)
    data = "".join(f"\n  {note}" for note in notes.kept)
    try_folder(plan, reading)
    if local:
        return f"this process: one worker a pool, whatever the pools ask for{data}"
    where, present = "this machine", {"CPU": float(num_cores())}
    if address is not None:
        from flowrl.engine.pools import RayCluster

        cluster = RayCluster(plan.pools, (), num_cores(), address, lambda _: None)
        try:
            where, present = f"the cluster at {address}", cluster.connect()
        finally:
            cluster.close()
        refuse_unavailable(plan, reading, bool(present.get("GPU")), address)
    require(plan, reading, present)
    asked = {name: amount for name, amount in asked_for(plan, present).items() if amount}
    shown = ", ".join(f"{_shown(amount)} of {_shown(present.get(name, 0.0))} {name}" for name, amount in asked.items())
    return f"{where}: {shown} asked for: it fits{data}"


def refuse_unavailable(plan: Plan, reading: Reading, accelerators: bool | None, address: str | None = None) -> None:
    """What may be planned and cannot be run (FR079), or not yet here: a model to fetch (FR010), a way for weights that
    needs GPUs where there are none (FR056), what workers that start here would lack (FR031), a tracker whose package is
    not installed (FR007).
    """
    refused = ("FR010", "FR079") if address is not None else ("FR010", "FR031", "FR079")
    syncs = [node for node in plan.graph.nodes.values() if node.weights == "syncs"]
    routes = [(node, plan.pool_of(node), plan.engine_pools(node.model)) for node in syncs]
    found = [replace(p, severity="error") if p.code in refused else p for p in plan.warnings]
    found += [*refused_placements(reading, routes, accelerators), *refused_trackers(plan, reading)]
    if any(problem.severity == "error" for problem in found):
        raise PipelineError(found)


def refused_trackers(plan: Plan, reading: Reading) -> Iterator[Problem]:
    """FR007: trackers whose package is not installed here."""
    for position, spec in enumerate(plan.document.tracking):
        if fix := missing_package(spec):
            listed = isinstance(reading.resolved.get("tracking"), list)
            place = reading.place(("tracking", position, "type") if listed else ("tracking", "type"))
            fact = f"tracking: type '{spec.type}' needs the package {spec.package}, which is not installed here"
            yield Problem("FR007", place, fact, fix)


@contextmanager
def run_folder(plan: Plan, reading: Reading, resolved: str, start: Start) -> Iterator[RunFolder]:
    """The run folder, a new one or that of the run that goes on, whose later records are cut; kept by `run.json`."""
    if start.folder is None:
        folder = make_folder(plan, reading)
    else:
        folder = RunFolder(Path(plan.document.run.dir), plan.document.name, start.folder)
    try:
        with attempted(folder.path, run_info(plan, resolved), max(start.last_kept, 0)):
            start.cut()
            yield folder
    except StillRunning:
        place = reading.place(("checkpoint", "resume"))
        raise PipelineError([Problem("FR080", place, f"{folder.path.name} is running in another process")]) from None


def make_folder(plan: Plan, reading: Reading) -> RunFolder:
    """The run folder; one that cannot be made is the user's to put right, before anything starts."""
    try:
        return RunFolder(Path(plan.document.run.dir), plan.document.name)
    except OSError as error:
        raise _no_folder(plan, reading, error) from None


def try_folder(plan: Plan, reading: Reading) -> None:
    """Whether a run folder could be made, without leaving one behind."""
    folder = Path(plan.document.run.dir).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        tempfile.TemporaryDirectory(dir=there).cleanup()
    except OSError as error:
        raise _no_folder(plan, reading, error) from None


def _no_folder(plan: Plan, reading: Reading, error: OSError) -> PipelineError:
    fact = f"cannot make a run folder in '{plan.document.run.dir}': {error.strerror or error}"
    return PipelineError(
        [Problem("FR001", reading.place(("run", "dir")), fact, "run.dir: a folder that can be written")]
    )


def run_recorded(
    plan: Plan,
    reading: Reading,
    prompts: PromptStream,
    validation: Mapping[str, Sequence[Prompt]],
    recorder: Recorders,
    save: SavePlan,
    *,
    local: bool,
    address: str | None,
) -> None:
    """Start the workers, run the loop, and end them, whatever happens."""
    cluster: Cluster | None = None
    try:
        if local:
            recorder.note(LOCAL_NOTE)
            cluster = LocalCluster()
            device = "cpu"
        else:
            from flowrl.engine.pools import RayCluster

            modules = [node.ref.module for node in plan.graph.nodes.values() if not node.ref.source]
            cluster = RayCluster(plan.pools, modules, num_cores(), address, recorder.stage)
            resources = cluster.connect()
            device = "cuda" if resources.get("GPU") else "cpu"
            refuse_unavailable(plan, reading, device == "cuda", address)
            if address is not None or device == "cuda":
                require(plan, reading, resources)
        on_signal(signal.SIGTERM, signal.default_int_handler)  # ends the run as Ctrl-C does
        workers = worker_setups(plan, num_cores=num_cores(), device=device, can_kill=not local)
        cluster.start(workers)
        saver = save.saver(plan.document, cluster, [worker.name for worker in workers], recorder)
        asyncio.run(Loop(plan, workers, cluster, prompts, recorder, validation, saver, save.resumed).train())
    except (KeyboardInterrupt, asyncio.CancelledError):
        on_signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it must not break off the ending
        recorder.close("interrupted")
        raise KeyboardInterrupt from None
    except BaseException as error:
        if isinstance(error, RunError) and error.details:
            recorder.note(error.details, "traceback")
        recorder.close("failed", [str(error)])
        raise
    else:
        recorder.close("finished")
    finally:
        if cluster is not None:
            cluster.close()


@contextmanager
def signals_restored() -> Iterator[None]:
    """Whatever a run does to the handling of signals, a notebook or a service finds its own again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            on_signal(number, handler)


def on_signal(number: signal.Signals, handler: Any) -> None:
    """Set a handler, where that is possible: only the main thread may."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(number, handler)


def _shown(amount: float) -> str:
    """Up to three decimals, never an exponent."""
    return f"{amount:.3f}".rstrip("0").rstrip(".")


def asked_for(plan: Plan, present: Mapping[str, float]) -> dict[str, float]:
    """What all pools ask for together, by Ray's names."""
    asked: dict[str, float] = {}
    for pool in plan.pools.values():
        for name, amount in pool.needs(accelerators=bool(present.get("GPU"))).items():
            asked[name] = asked.get(name, 0.0) + amount * pool.workers
    return asked


def require(plan: Plan, reading: Reading, present: Mapping[str, float]) -> None:
    """FR051: what the pools ask for must be there; refused with a table instead of waiting for ever."""
    asked = asked_for(plan, present)
    short = [name for name, amount in asked.items() if amount > present.get(name, 0.0) + 1e-9]
    if not short:
        return
    notes = []
    for pool in plan.pools.values():
        needs = pool.needs(accelerators=bool(present.get("GPU")))
        shown = ", ".join(f"{_shown(amount * pool.workers)} {name}" for name, amount in needs.items())
        notes.append(f"pools.{pool.name} asks for {pool.workers} worker{'s' * (pool.workers > 1)}: {shown}")
    largest = max(plan.pools.values(), key=lambda pool: pool.workers * pool.cpus_per_worker)
    there = ", ".join(f"{_shown(present.get(name, 0.0))} {name}" for name in asked)
    total = ", ".join(f"{_shown(amount)} {name}" for name, amount in asked.items())
    share = int(100 * present.get("CPU", 0.0) / max(asked.get("CPU", 1.0), 1e-9) * largest.cpus_per_worker) / 100
    fix = f"--set pools.{largest.name}.workers=N with fewer workers"
    if short == ["CPU"] and share > 0:
        fix += f", or let workers share cores: --set pools.{largest.name}.cpus_per_worker={share:g}"
    place = reading.place(("pools", largest.name, "workers"))
    raise PipelineError([Problem("FR051", place, f"the pools ask for {total}; present: {there}", fix, tuple(notes))])
