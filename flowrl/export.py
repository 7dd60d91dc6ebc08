"""`flowrl export`: the model of a checkpoint as a Hugging Face folder.

Everything needed stands in the checkpoint, so that the data and files of the pipeline may be gone.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowrl.commands import FINE, WRONG, say
from flowrl.engine.checkpoint import Checkpoint, Incomplete, folders_of, latest, read
from flowrl.errors import nearest
from flowrl.model import ModelSpec
from flowrl.model_files import ModelError
from flowrl.node import Node
from flowrl.registry import BrokenNode, NodeRef, UnknownNode
from flowrl.run_files import CHECKPOINTS, known_runs, named_run
from flowrl.spec.strict import validated

OTHERS = "any program that loads Hugging Face folders"
"""What else reads a whole model."""
ADAPTER_USE = "beside its base model, with peft or vLLM; without --adapter it is merged into one model"
"""What reads an adapter."""


class _Refused(Exception):
    """Why nothing is exported."""


def export_run(run: str, step: int | None, output: Path | None, adapter: bool, model: str | None, root: str) -> int:
    """Write the model of a run, which is given by its folder or by its name among the runs of `root`."""
    try:
        found = _checkpoint(run, step, root)
        node, update = _update(found, model)
        folder = Path(os.path.expanduser(output or found.path.parents[1] / "exported" / found.path.name)).absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise _Refused(f"'{folder}' exists and is not empty; give another folder by -o")
        say(f"exporting {update['model']} of {found}")
        _write(found, node, update, folder, adapter)
    except _Refused as error:
        say(f"error: {error}")
        return WRONG
    keys = f"path: {folder}" + ", head: value" * (update["spec"].get("head") == "value")
    print(f"wrote {folder}\nuse it: {ADAPTER_USE if adapter else f'`{keys}` under models:, or {OTHERS}'}")
    return FINE


def _checkpoint(run: str, step: int | None, root: str) -> Checkpoint:
    folder = named_run(run, root)
    if folder is None:
        near = nearest(run, known_runs(root)) or "give the folder of a run, or its name if it is in ./runs"
        raise _Refused(f"there is no run '{run}'; {near}")
    place = Path(run).expanduser()
    if step is None and place.parent.name == CHECKPOINTS:
        step = int(place.name.rpartition("_")[2]) if place.name.rpartition("_")[2].isdecimal() else None
    if step is None:
        found, faults = latest(folder)
        for fault in faults:
            say(f"warning: {fault}")
        if found is None:
            raise _Refused(f"{folder.name} has no complete checkpoint")
        return found
    try:
        return read(folder / CHECKPOINTS / f"step_{step}")
    except Incomplete as fault:
        steps = ", ".join(str(number) for number, _ in sorted(folders_of(folder))) or "none"
        raise _Refused(f"{folder.name} has no checkpoint of step {step}: {fault}; steps there: {steps}") from None


def _update(found: Checkpoint, model: str | None) -> tuple[str, Mapping[str, Any]]:
    """Name and description of the update whose model is asked for."""
    updates: Mapping[str, Mapping[str, Any]] = found.marker.get("updates", {})
    models = {update["model"]: (name, update) for name, update in updates.items()}
    if not models:
        raise _Refused(f"{found.path.parents[1].name} has trained no model")
    if model is None and len(models) > 1:
        raise _Refused(f"the run trains several models; give --model with one of: {', '.join(sorted(models))}")
    name = model or next(iter(models))
    if name not in models:
        raise _Refused(f"the run trains no model '{name}'; {nearest(name, models)}")
    return models[name]


def _write(found: Checkpoint, name: str, update: Mapping[str, Any], folder: Path, adapter: bool) -> None:
    """Into a folder beside it first: one that was broken off must not look like a model."""
    from flowrl.engine.sharded import read as read_state

    partial = folder.with_name(f".{folder.name}-{secrets.token_hex(4)}.partial")
    try:
        node = validated(NodeRef(**update["class"]).load(), dict(update["params"]))
        assert isinstance(node, Node)
        spec = ModelSpec.model_validate_json(json.dumps(update["spec"]))
        partial.mkdir(parents=True)
        node.export(read_state(found.path / "nodes" / name, {}), spec, str(partial), adapter)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except (ModelError, UnknownNode, BrokenNode, NotImplementedError) as error:
        raise _Refused(str(error)) from error
    except OSError as error:
        raise _Refused(f"cannot write '{folder}': {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
