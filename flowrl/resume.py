"""Where a run begins: at step 1 of a folder of its own, or after a checkpoint of a run that did not finish.

`checkpoint.resume: auto` looks at the run of the same name that was started last with the same settings. If it did not
finish and has a complete checkpoint, it goes on; if it had saved nothing, it begins again. In any other case a new run
starts, and a line says why. A run that somebody names is gone on with whatever has changed, unless it cannot be loaded
(FR080).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from flowrl.data.base import DataFault
from flowrl.data.stream import PromptStream
from flowrl.engine.checkpoint import Checkpoint, Incomplete, drop_after, has_saved, latest, read
from flowrl.engine.cluster import Cluster
from flowrl.engine.saver import Saver
from flowrl.errors import PipelineError, Place, Problem, nearest
from flowrl.graph.plan import Plan
from flowrl.graph.sizes.adapters import other_adapters
from flowrl.graph.sizes.architecture import Architecture
from flowrl.graph.sizes.model_config import architecture_of
from flowrl.model import ModelSpec
from flowrl.run_files import CHECKPOINTS, RunInfo, cut_records, is_running, known_runs, named_run, read_info, runs_of
from flowrl.schedule.record import Level, Recorder
from flowrl.spec.document import CheckpointSpec, Document
from flowrl.spec.read import Reading

FREE = ("run.steps", "run.dir", "checkpoint", "tracking")
"""Settings that may change between two attempts at one run."""
ORDER = ("shuffle", "streaming", "buffer")
"""Settings of data that say in which order its rows are taken."""
CHANGES = {
    "fingerprint": "its rows have changed",
    "seed": "run.seed has changed",
    "order": "its order has changed",
}
"""What must be the same for a position in the data to mean the same rows, and what to say where it is not."""
Note = Callable[[str, Level], None]


@dataclass(frozen=True)
class Start:
    """Where a run begins."""

    told: str = ""
    """What a person should know of it."""
    folder: Path | None = None
    """The run folder to go on in; None makes a new one."""
    checkpoint: Checkpoint | None = None
    faults: tuple[str, ...] = ()
    """Newer checkpoints that are left out, and why."""

    @property
    def last_kept(self) -> int:
        """The last step whose records stay: not even step 0, which comes again, of a run that begins again."""
        return self.checkpoint.step if self.checkpoint is not None else -1

    def cut(self) -> None:
        """Remove what the run has recorded and saved of later steps."""
        if self.folder is not None:
            cut_records(self.folder, self.last_kept)
            drop_after(self.folder, self.last_kept)

    def metrics(self) -> list[tuple[int, dict[str, float]]]:
        """Of the steps that are already done, each with its number."""
        file = self.folder / "metrics.jsonl" if self.folder is not None else None
        lines = file.read_text(encoding="utf-8").split("\n") if file is not None and file.is_file() else []
        found = [json.loads(line) for line in lines if line]
        return [(line.pop("step"), {k: math.nan if v is None else v for k, v in line.items()}) for line in found]

    def tell(self, note: Note) -> None:
        """Say where the run begins, and what is wrong with newer checkpoints."""
        for fault in self.faults:
            note(fault, "warning")
        if self.told:
            note(self.told, "info")

    def place_in_data(self, identity: Mapping[str, Any], prompts: PromptStream, note: Note) -> None:
        """Put the data where it was; where it is other data it stays at its start, with a warning."""
        if self.checkpoint is None:
            return
        saved = self.checkpoint.data
        changed = [shown for key, shown in CHANGES.items() if saved.get(key) != identity[key]]
        if not changed:
            prompts.load_state(dict(saved["state"]))
            return
        note(f"data.train: {changed[0]} since the checkpoint, so it starts at its beginning; rows that were trained on "
             "may come again", "warning")  # fmt: skip


NEW = Start()
"""A new run, of which nothing is to be said."""


@dataclass(frozen=True)
class SavePlan:
    """What a run saves, and what it goes on from."""

    folder: Path
    """The run folder."""
    about: Mapping[str, Any]
    """What every checkpoint says of the run."""
    resumed: Checkpoint | None = None

    def saver(self, document: Document, cluster: Cluster, workers: Sequence[str], recorder: Recorder) -> Saver | None:
        """Saves the checkpoints, if the document wants any."""
        if document.checkpoint is None:
            return None
        saved = self.resumed.step if self.resumed is not None else 0
        return Saver(
            self.folder, document.checkpoint, document.run.steps, cluster, workers, recorder, self.about, saved
        )


def where_to_start(plan: Plan, reading: Reading, resolved: str, named: str | None) -> Start:
    """As `--resume` has `named` it, else as the document says. Raises `PipelineError` with FR080."""
    spec = plan.document.checkpoint or CheckpointSpec(resume="never")
    wanted = spec.resume if named is None else named
    if wanted == "auto":
        return _automatic(plan, resolved)
    if wanted == "never":
        return NEW
    option = Place("--resume", 1, 1, len(wanted), wanted, "checkpoint.resume")
    return _forced(plan, resolved, wanted, option if named is not None else reading.place(("checkpoint", "resume")))


def _automatic(plan: Plan, resolved: str) -> Start:
    runs, settings = runs_of(plan.document.name, plan.document.run.dir), run_info(plan, resolved).settings
    for folder, info in runs:
        if info.settings == settings:
            return _gone_on_with(folder, info, plan)
    for folder, info in runs[:1]:
        found, _ = latest(folder)
        if not info.finished and found is not None:
            changed = _shown(_differences(folder, plan, resolved))
            return Start(f"starts anew: {folder.name} did not finish (checkpoint of step {found.step}), but has other "
                         f"settings: {changed}; --resume {folder.name} goes on from it")  # fmt: skip
    return NEW


def _gone_on_with(folder: Path, info: RunInfo, plan: Plan) -> Start:
    found, faults = latest(folder)
    if is_running(folder):
        return Start(f"starts anew: {folder.name} has the same settings and is still running")
    if info.finished:
        return NEW
    anew = "--resume never starts anew"
    if found is None and has_saved(folder):  # of which something may still be saved by hand
        return Start(f"starts anew: {folder.name} did not finish and has no complete checkpoint", faults=faults)
    if found is None:
        told = f"begins again in {folder.name}, which did not finish and had saved nothing; {anew}"
        return Start(told, folder, faults=faults)
    steps = plan.document.run.steps
    if found.step > steps:
        told = f"starts anew: {folder.name} did not finish, but it is at step {found.step} of {steps}"
        return Start(told, faults=faults)
    return Start(f"goes on from step {found.step} of {folder.name}; {anew}", folder, found, faults)


def _forced(plan: Plan, resolved: str, run: str, place: Place) -> Start:
    def refused(fact: str, fix: str = "") -> PipelineError:
        return PipelineError([Problem("FR080", place, fact, fix)])

    root = plan.document.run.dir
    folder = named_run(run, root)
    if folder is None:
        raise refused(f"there is no run '{run}'", nearest(run, known_runs(root)) or "the name of a run folder")
    if is_running(folder):
        raise refused(f"{folder.name} is still running", "wait for its end, or stop it")
    found, faults = _asked_for(run, root, folder)
    if found is None:
        newest, _ = latest(folder)
        fact = f"{folder.name} has no complete checkpoint: {'; '.join(faults) or 'it has saved none'}"
        raise refused(fact, f"{newest.path}, which is complete" if newest is not None else "")
    steps, info = plan.document.run.steps, read_info(folder)
    if found.step > steps or (found.step == steps and info is not None and info.finished):
        raise refused(f"{folder.name} is at step {found.step} of {steps}", f"--steps {found.step + 1} or more")
    if fault := _unfit(found, plan):
        raise refused(f"the checkpoint of {found} cannot be loaded: {fault}", "the settings that it was saved with")
    changed = _shown(_differences(folder, plan, resolved))
    told = f"goes on from step {found.step} of {folder.name}" + f", with other settings: {changed}" * bool(changed)
    return Start(told, folder, found, faults)


def _asked_for(run: str, root: str, folder: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest checkpoint of a run, or the one that was named."""
    for path in (Path(run).expanduser(), Path(root) / run):
        if path.parent.name == CHECKPOINTS and path.parent.parent == folder:
            try:
                return read(path), ()
            except Incomplete as fault:
                return None, (f"{CHECKPOINTS}/{path.name}: {fault}",)
    return latest(folder)


def about(plan: Plan) -> dict[str, Any]:
    """What a checkpoint says of the models that it holds: enough to know, before anything is loaded, who can."""
    updates = [node for node in plan.graph.nodes.values() if node.weights == "updates" and node.model is not None]
    return {
        "updates": {
            node.name: {
                "model": node.model,
                "shape": _shape(plan, node.model),
                "spec": plan.document.models[node.model or ""].model_dump(mode="json"),
                "class": asdict(node.ref),
                "params": node.spec.params,
            }
            for node in updates
        }
    }


def _shape(plan: Plan, model: str | None) -> dict[str, Any] | None:
    found = architecture_of(plan.document.models[model or ""])
    return asdict(found) if isinstance(found, Architecture) else None


def _unfit(checkpoint: Checkpoint, plan: Plan) -> str:
    """Why the models of a plan cannot load a checkpoint, as far as that can be told from here; empty if they can."""
    saved = checkpoint.marker.get("updates", {})
    for name, now in about(plan)["updates"].items():
        if name not in saved:
            return f"it holds no weights for nodes.{name}, but for {', '.join(saved) or 'none'}"
        was = saved[name]["shape"]
        differ = [key for key in was or {} if now["shape"] is not None and now["shape"].get(key) != was[key]]
        if differ:
            key = differ[0]
            return f"models.{now['model']} had {key} {was[key]} and now has {now['shape'].get(key)}"
        spec = plan.document.models[now["model"]]
        before = ModelSpec.model_validate_json(json.dumps(saved[name]["spec"]))
        if fault := other_adapters(architecture_of(spec), before.lora, spec.lora):
            return f"models.{now['model']} {fault}"
    return ""


def data_identity(plan: Plan) -> dict[str, Any]:
    """What must be the same for a position in the data to mean the same rows."""
    train = plan.document.data["train"]
    try:
        fingerprint = train.fingerprint()
    except (OSError, DataFault, PipelineError) as error:
        fingerprint = f"unknown: {error}"
    order = {key: value for key, value in _flat(train.model_dump(mode="json")) if key.rpartition(".")[2] in ORDER}
    return {"fingerprint": fingerprint, "seed": plan.document.run.seed, "order": order}


def run_info(plan: Plan, resolved: str) -> RunInfo:
    """What `run.json` says of a run of this plan."""
    nodes = tuple(sorted(plan.graph.nodes))
    text = json.dumps(_settings(resolved, nodes), sort_keys=True)
    return RunInfo(plan.document.name, hashlib.sha256(text.encode()).hexdigest()[:16], nodes)


def _settings(resolved: str, nodes: Sequence[str]) -> dict[str, str]:
    """All settings by dotted name but those that may change between two attempts, and the nodes that run."""
    every = dict(_flat(yaml.load(resolved, Loader=yaml.CBaseLoader) or {}))
    free = tuple(f"{key}." for key in FREE)
    kept = {key: str(value) for key, value in every.items() if not f"{key}.".startswith(free)}
    return {**kept, "the nodes": ", ".join(nodes)}


def _differences(folder: Path, plan: Plan, resolved: str) -> dict[str, tuple[str, str]]:
    """The settings, by dotted name, that a run had and this one has, where they differ."""
    try:
        text = (folder / "pipeline.yaml").read_text(encoding="utf-8")
    except OSError:
        text = ""
    info = read_info(folder)
    was = _settings(text, info.nodes if info is not None else ())
    now = _settings(resolved, sorted(plan.graph.nodes))
    return {
        key: (was.get(key, "nothing"), now.get(key, "nothing"))
        for key in dict.fromkeys([*was, *now])
        if was.get(key) != now.get(key)
    }


def _shown(differences: Mapping[str, tuple[str, str]]) -> str:
    listed = [f"{key} {was} -> {now}" for key, (was, now) in differences.items()]
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of every leaf; a list is a leaf."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value)
