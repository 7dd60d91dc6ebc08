"""Where the `config.json` of a model lies on this machine; well-known models are known without one.

The order is that in which the weights would be found: a shipped or fetched model, a folder, a GGUF file, whose header
says the same, the Hugging Face cache. What is not
here yet, and would be downloaded, may be among the facts of `nodes/assets/model_configs.json`: the keys of published
configurations that sizes follow from, with the published number of parameters, which a test compares.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from flowrl.graph.sizes.architecture import Architecture, Unknown, from_config
from flowrl.graph.sizes.gguf import architecture_of_gguf
from flowrl.model import ModelSpec
from flowrl.model_files import ASSETS, fault_of, gguf_file, local_folder

FACTS = ASSETS / "model_configs.json"


def architectures(models: Iterable[tuple[str, ModelSpec]]) -> dict[str, Architecture | Unknown]:
    """The architecture of each model by its name in the document; every configuration is read once."""
    named = dict(models)
    found = {path: read_architecture(path) for path in dict.fromkeys(spec.path for spec in named.values())}
    return {name: _headed(found[spec.path], spec) for name, spec in named.items()}


def architecture_of(spec: ModelSpec) -> Architecture | Unknown:
    """The architecture of a model, as `read_architecture`, with the head that it is given."""
    return _headed(read_architecture(spec.path), spec)


def _headed(model: Architecture | Unknown, spec: ModelSpec) -> Architecture | Unknown:
    return model.with_value_head() if spec.head == "value" and isinstance(model, Architecture) else model


def read_architecture(path: str) -> Architecture | Unknown:
    """The architecture of a model by any of its names; never raises, loads nothing but `config.json` or a header."""
    source = gguf_file(path)
    if source is not None:
        return architecture_of_gguf(source)
    try:
        file = _config_file(path)
        if file is not None:
            return from_config(json.loads(file.read_text(encoding="utf-8")))
        facts = _facts().get(path)
    except (OSError, ValueError, RuntimeError) as error:  # too deep a nesting and an unknown `~user` are RuntimeErrors
        said = error.strerror if isinstance(error, OSError) else str(error)
        return Unknown(f"its config.json cannot be read: {(said or type(error).__name__).splitlines()[0][:120]}")
    if facts is not None:
        return from_config(facts)
    fault = fault_of(path)
    return Unknown(
        fault.fact
        if fault is not None
        else f"the config.json of '{path}' is neither in a folder of this name nor in the Hugging Face cache"
    )


def folder_here(path: str) -> Path | None:
    """The folder of a model or tokenizer that is on this machine; None of a GGUF file, and of what is not here."""
    if gguf_file(path) is not None:
        return None
    folder = local_folder(path)
    if folder is None and fault_of(path) is None:
        config = _cached(path)
        return None if config is None else config.parent
    return folder


def _config_file(path: str) -> Path | None:
    """The file, if the model is on this machine. Raises `OSError` where its folder lacks one."""
    folder = local_folder(path)
    if folder is None:
        return None if fault_of(path) is not None else _cached(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(2, f"the folder '{path}' has none")
    return folder / "config.json"


def _cached(hub_id: str) -> Path | None:
    """The configuration in the Hugging Face cache: of the revision that `main` points to, else the newest."""
    repository = _cache_folder() / ("models--" + hub_id.replace("/", "--"))
    snapshots = sorted(repository.glob("snapshots/*/config.json"), key=lambda file: file.lstat().st_mtime)
    main = repository / "refs" / "main"
    if main.is_file():
        revision = main.read_text(encoding="utf-8").strip()
        snapshots += [file for file in snapshots if file.parent.name == revision]
    return snapshots[-1] if snapshots else None


def _cache_folder() -> Path:
    """The folder of the hub's cache, by the environment variables that its client obeys."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


@cache
def _facts() -> dict[str, dict[str, Any]]:
    """Configurations of well-known models by hub id."""
    entries = json.loads(FACTS.read_text(encoding="utf-8"))
    return {
        name: {**entry["config"], "max_position_embeddings": positions}
        for entry in entries
        for name, positions in entry["ids"].items()
    }
