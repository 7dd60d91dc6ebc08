"""New files to start from: a node with its test and its pipeline, or a copy of a pipeline. Nothing is overwritten."""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template
from typing import Any, Literal, NamedTuple, get_args

import flowrl
from flowrl.errors import PipelineError, nearest
from flowrl.pipeline import load
from flowrl.spec.document import Document
from flowrl.spec.load import SHIPPED, found_file, load_file, shipped_pipelines
from flowrl.spec.params import REFERENCE
from flowrl.spec.scalars import resolve
from flowrl.spec.schema import nodes_used, schema_text
from flowrl.spec.tree import Span, Tree

Kind = Literal["reward", "advantage", "filter", "metric"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BASE = "grpo_sync"
TEMPLATES = Path(__file__).parent / "templates"
SCHEMA = ".flowrl/pipeline.schema.json"
"""Beside the pipeline, for the editor; made again at any time by `flowrl schema`."""

_MODELINE = re.compile(r"^#\s*yaml-language-server:\s*\$schema=.*$", re.M)
_OTHER_NAMES = {"exact", "total"}
"""Names of fields and nodes in the templates."""


class ScaffoldError(ValueError):
    """Nothing was written; the message says why, and what to do."""


def new_node(name: str, kind: Kind, folder: Path) -> list[Path]:
    """`NAME.py`, `test_NAME.py` and `NAME.yaml`, which pass test and check at once. Raises `ScaffoldError`."""
    _refuse_other_words(name)
    files = {folder / f"{name}.py": f"{kind}.py", folder / f"test_{name}.py": f"test_{kind}.py"}
    files[folder / f"{name}.yaml"] = f"{kind}.yaml"
    _refuse_existing(files)
    _refuse_module_name(name, folder)
    cls = _class_name(name)
    words = {"name": name, "cls": cls, "use": f"./{name}.py:{cls}", "module": _import_path(folder, name)}
    texts = {path: Template((TEMPLATES / f"{file}.txt").read_text("utf-8")) for path, file in files.items()}
    return _write({path: template.substitute(words) for path, template in texts.items()})


def _refuse_other_words(name: str) -> None:
    """It must do as a module, as a field, and as a key in YAML."""
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or len(name) > 60:
        raise ScaffoldError(
            f"'{name}' cannot name a node: use letters, digits and _, a letter first, as in `my_reward`"
        )
    if keyword.iskeyword(name) or keyword.iskeyword(name.title()) or not isinstance(resolve(name), str):
        raise ScaffoldError(f"'{name}' means something else to Python or YAML; such as `my_{name}` can be a node")


def _class_name(name: str) -> str:
    """CamelCase; neither it nor the name is one that the new files use already."""
    cls = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    graph = load(BASE).plan().graph
    if name in {*graph.nodes, *graph.fields, *_OTHER_NAMES}:
        raise ScaffoldError(f"the pipeline has a node or a field '{name}' already; such as `my_{name}` is free")
    if cls in {*flowrl.__all__, "Field", "NamedTuple", "Out", "Path"}:
        raise ScaffoldError(f"the class would be called {cls}, as one that it uses; such as `my_{name}` is free")
    return cls


def _refuse_module_name(name: str, folder: Path) -> None:
    """The module must not hide another one, or be hidden by it."""
    if name in sys.stdlib_module_names:
        raise ScaffoldError(f"'{name}' is a module of Python, which {name}.py would hide; such as `my_{name}` is free")
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    places = [spec.origin] if spec and spec.origin else [*(spec.submodule_search_locations or ())] if spec else []
    plain_folder = folder.resolve() / name  # without __init__.py it gives way to the module
    if places and any(Path(place).resolve() != plain_folder for place in places):
        raise ScaffoldError(f"'{name}' is a module already ({places[0]}); such as `my_{name}` is free")


def _import_path(folder: Path, name: str) -> str:
    """How the test imports the module: by its own name, or from the package that the folder is part of."""
    parts = [name]
    here = folder.resolve()
    while (here / "__init__.py").exists():
        parts.insert(0, here.name)
        here = here.parent
    return ".".join(parts)


def new_pipeline(name: str, source: str, folder: Path) -> list[Path]:
    """`NAME.yaml`, a copy to change, and the schema for its editor. Raises `ScaffoldError` or `PipelineError`."""
    name = re.sub(r"\.ya?ml$", "", name)
    limits = Document.model_json_schema()["properties"]["name"]
    if not re.fullmatch(limits["pattern"], name) or len(name) > limits["maxLength"]:
        raise ScaffoldError(f"'{name}' cannot name a pipeline: use letters, digits, _ and -")
    path, schema = folder / f"{name}.yaml", folder / SCHEMA
    _refuse_existing([path])
    original = _source(source)
    text = _with_modeline(_copied(original, name, folder))
    written = _write({path: text})
    schema.parent.mkdir(exist_ok=True)
    schema.write_text(schema_text(nodes_used(sorted(folder.glob("*.yaml")))), encoding="utf-8")
    return [*written, schema]


def _source(source: str) -> Path:
    path = found_file(Path(source)) if "/" not in source else Path(source)
    if not path.is_file():
        files = [file.name for file in path.parent.glob("*.y*ml")] if path.suffix else []
        near = nearest(path.name, [*files, *shipped_pipelines()])
        raise ScaffoldError(f"there is no pipeline '{source}', neither shipped nor a file; {near}")
    return path


class _Edit(NamedTuple):
    """A stretch of one line and what takes its place; of length 0 it is put before the column."""

    line: int
    column: int
    length: int
    text: str


def _copied(path: Path, name: str, folder: Path) -> str:
    """The text under another name, its relative paths leading where they led."""
    tree, problems = load_file(path, str(path))
    if tree is None or problems:
        raise PipelineError(problems)
    lines = path.read_text("utf-8-sig").splitlines()
    for edit in sorted({*_renamed(tree, name), *_moved(tree, path.parent, folder)}, reverse=True):
        line, start = lines[edit.line - 1], edit.column - 1
        lines[edit.line - 1] = line[:start] + edit.text + line[start + edit.length :]
    return "\n".join(lines) + "\n"


def _renamed(tree: Tree, name: str) -> Iterator[_Edit]:
    entry = tree.entries.get("name")
    if entry is not None:
        yield _edit(entry.tree.span, name)
    elif tree.entries:
        first = min(entry.key.line for entry in tree.entries.values())
        yield _Edit(first, 1, 0, f"name: {_scalar(name)}\n")


def _moved(tree: Tree, old: Path, new: Path) -> Iterator[_Edit]:
    """New paths for every value that names a file from the folder of the document."""
    base = tree.entries.get("extends")
    if base is not None and isinstance(base.tree.value, str):
        yield _edit(base.tree.span, _base(base.tree.value, old, new))
    if old.resolve() == new.resolve():
        return
    params = {name: entry.tree for name, entry in _entries(tree, "params").items()}
    for section, key in (("data", "path"), ("models", "path"), ("nodes", "use")):
        for entry in _entries(tree, section).values():
            found = entry.tree.entries.get(key)
            value = found.tree if found is not None else Tree(None, tree.span)
            match = REFERENCE.fullmatch(value.value) if isinstance(value.value, str) else None
            value = params.get(match[1], value) if match else value
            if isinstance(value.value, str) and (moved := _path(section, value.value, old, new)):
                yield _edit(value.span, moved)


def _entries(tree: Tree, section: str) -> Mapping[str, Any]:
    return tree.entries[section].tree.entries if section in tree.entries else {}


def _base(value: str, old: Path, new: Path) -> str:
    """What the copy extends: a shipped pipeline by its name, another file by its path."""
    path = old / value
    if "/" not in value and found_file(path) != path:
        return value
    if path.resolve().parent == SHIPPED.resolve():
        return path.stem
    return _relative(path, new) if not Path(value).is_absolute() else value


def _path(section: str, value: str, old: Path, new: Path) -> str:
    """The value as written from the new folder; empty where it names no file, or one from the root."""
    where, colon, cls = value.rpartition(":") if section == "nodes" else (value, "", "")
    if not where or where.startswith(("/", "~")) or (section == "nodes" and not where.endswith(".py")):
        return ""
    if section == "models" and not (where.startswith(("./", "../")) or (old / where).is_dir()):
        return ""
    return _relative(old / where, new) + colon + cls


def _relative(path: Path, folder: Path) -> str:
    there = os.path.relpath(path.resolve(), folder.resolve())
    return there if there.startswith("..") else f"./{there}"


def _edit(span: Span, value: str) -> _Edit:
    return _Edit(span.line, span.column, span.length, _scalar(value))


def _scalar(text: str) -> str:
    """The text as a string in YAML, in quotes where it would be something else."""
    is_plain = re.fullmatch(r"[\w./][\w./:-]*", text, re.ASCII) and isinstance(resolve(text), str)
    return text if is_plain else json.dumps(text, ensure_ascii=False)


def _with_modeline(text: str) -> str:
    line = f"# yaml-language-server: $schema={SCHEMA}"
    found, num = _MODELINE.subn(line, text, count=1)
    return found if num else f"{line}\n{text}"


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise ScaffoldError(f"{path} exists already, and nothing is overwritten: choose another name or --folder")


def _write(texts: Mapping[Path, str]) -> list[Path]:
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScaffoldError(f"cannot write {path}: {error.strerror}") from error
    return list(texts)
