"""New files to start from: a node with its test and its pipeline, or a copy of a pipeline. Nothing is overwritten."""

from __future__ import annotations

import builtins
import importlib.util
import json
import keyword
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, get_args

import flowrl
from flowrl.errors import PipelineError, nearest
from flowrl.graph.build import DATA
from flowrl.pipeline import load
from flowrl.spec.data_paths import named_files
from flowrl.spec.document import Document
from flowrl.spec.load import SHIPPED, found_file, load_file, load_text, shipped_pipelines
from flowrl.spec.params import REFERENCE
from flowrl.spec.scalars import is_date, resolve
from flowrl.spec.schema import nodes_used, schema_text
from flowrl.spec.tree import Path_, Source, Span, Tree, locate, plain

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
    _refuse_taken(name)
    _refuse_module_name(name, folder)
    cls = _class_name(name)
    words = {"name": name, "cls": cls, "use": f"./{name}.py:{cls}", "module": _import_path(folder, name)}
    templates = {path: Template((TEMPLATES / f"{file}.txt").read_text("utf-8")) for path, file in files.items()}
    texts = {path: template.substitute(words) for path, template in templates.items()}
    _refuse_what_fails(name, texts)
    return _write(texts)


def _refuse_other_words(name: str) -> None:
    """It must do as a module, as a field, and as a key in YAML."""
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or len(name) > 60:
        raise ScaffoldError(
            f"'{name}' cannot name a node: use letters, digits and _, a letter first, as in `my_reward`"
        )
    is_python = keyword.iskeyword(name) or keyword.iskeyword(name.title()) or hasattr(tuple, name)  # what `Out` is
    if is_python or not isinstance(resolve(name), str):
        raise ScaffoldError(f"'{name}' means something else to Python or YAML; such as `my_{name}` can be a node")


def _refuse_taken(name: str) -> None:
    """It would take the place of a node of the pipeline, be a second writer of a field, or bind an optional port."""
    graph = load(BASE).plan().graph
    ports = {port for node in graph.nodes.values() for port in node.cls.input_ports}
    if name in {*graph.nodes, *graph.fields, *ports, *_OTHER_NAMES, DATA}:
        raise ScaffoldError(f"the pipeline has a node or a field '{name}' already; such as `my_{name}` is free")


def _class_name(name: str) -> str:
    """CamelCase, and no name that the new files use already."""
    cls = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    if cls in {*flowrl.__all__, *dir(builtins), "Field", "NamedTuple", "Out", "Path"}:
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
    places += [str(init)] if (init := folder / name / "__init__.py").exists() else []
    if places and any(Path(place).resolve() != plain_folder for place in places):
        raise ScaffoldError(f"'{name}' is a module already ({places[0]}); such as `my_{name}` is free")


def _refuse_what_fails(name: str, texts: Mapping[Path, str]) -> None:
    """Whatever else a name may clash with: the pipeline is checked before anything of it is written."""
    with TemporaryDirectory() as place:
        _write({Path(place) / path.name: text for path, text in texts.items()})
        for problem in load(Path(place) / f"{name}.yaml").check():
            raise ScaffoldError(f"'{name}' does not do: {problem.fact}; such as `my_{name}` is free")


def _import_path(folder: Path, name: str) -> str:
    """How the test imports the module: by its own name, or from the package that the folder is part of."""
    parts = [name]
    here = folder.resolve()
    while (here / "__init__.py").exists():
        parts.insert(0, here.name)
        here = here.parent
    return ".".join(parts)


def new_pipeline(name: str, source: str, folder: Path) -> list[Path]:
    """`NAME.yaml`, the source's file under another name, and the schema for its editor.

    Raises `ScaffoldError` or `PipelineError`.
    """
    name = re.sub(r"\.ya?ml$", "", name)
    limits = Document.model_json_schema()["properties"]["name"]
    if not re.fullmatch(limits["pattern"], name) or len(name) > limits["maxLength"]:
        raise ScaffoldError(f"'{name}' cannot name a pipeline: use letters, digits, _ and -")
    path, schema = folder / f"{name}.yaml", folder / SCHEMA
    _refuse_existing([path])
    text = _copied(_source(source), name, folder)
    trees = [load_file(file, str(file)).tree for file in sorted(folder.glob("*.yaml"))]
    trees.append(load_text(text, Source(str(path), text.splitlines(), folder)).tree)
    used = nodes_used(tree for tree in trees if tree is not None)
    return _write({path: text, schema: schema_text(used.classes)})


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
    """The text under another name, its relative paths leading where they led.

    Where a text cannot be changed without changing more than that, it is a pipeline that extends the other.
    """
    tree, problems = load_file(path, str(path))
    if tree is None or problems:
        raise PipelineError(problems)
    changes: dict[Path_, str] = {("name",): name, **dict(_moved(tree, path.parent, folder))}
    base = _base(path.name, path.parent, folder)
    over = f"# Anything here lies over the pipeline below.\nextends: {_scalar(base)}\nname: {_scalar(name)}\n"
    meant: Any = plain(tree)
    for where, value in changes.items():
        meant = _with_value(meant, where, value)
    edited = _edited(path.read_text("utf-8-sig"), tree, changes)
    for text, meaning in ((edited, meant), (over, {"extends": base, "name": name})):
        text = _with_modeline(text)
        loaded = load_text(text, Source(name, text.splitlines()))
        if loaded.tree is not None and not loaded.problems and plain(loaded.tree) == meaning:
            return text
    raise ScaffoldError(f"the path '{base}' cannot be written in YAML: copy the file by hand")


def _with_value(data: Any, path: Path_, value: str) -> Any:
    if isinstance(data, list):
        return [_with_value(item, path[1:], value) if number == path[0] else item for number, item in enumerate(data)]
    return {**data, path[0]: _with_value(data.get(path[0]), path[1:], value)} if path else value


def _edited(text: str, tree: Tree, changes: Mapping[Path_, str]) -> str:
    """The text with these values, as far as each stands in one line."""
    lines = text.splitlines(keepends=True)
    if not text.endswith("\n"):
        lines[-1] += "\n"
    edits = {_edit(locate(tree, path), value) for path, value in changes.items() if path[0] in tree.entries}
    if "name" not in tree.entries:
        line, column = tree.span.line, tree.span.column
        key = f"name: {_scalar(changes['name',])}"
        in_braces = lines[line - 1][column - 1] == "{"
        before = _Edit(line, column, 0, f"{key}\n{' ' * (column - 1)}")
        edits.add(_Edit(line, column + 1, 0, f"{key}, ") if in_braces else before)
    for edit in sorted(edits, reverse=True):
        old, start = lines[edit.line - 1], edit.column - 1
        lines[edit.line - 1] = old[:start] + edit.text + old[start + edit.length :]
    return "".join(lines)


def _moved(tree: Tree, old: Path, new: Path) -> Iterator[tuple[Path_, str]]:
    """New paths for every value that names a file from the folder of the document."""
    base = tree.entries.get("extends")
    if base is not None and isinstance(base.tree.value, str):
        yield ("extends",), _base(base.tree.value, old, new)
    if old.resolve() == new.resolve():
        return
    for place, found in _files(tree):
        value, coded, of_model = found.value, place[-1] in ("use", "call"), place[0] == "models"
        match = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match and match[1] in _entries(tree, "params"):
            value, place = _entries(tree, "params")[match[1]].tree.value, ("params", match[1])
        if isinstance(value, str) and (moved := _path(value, old, new, coded, of_model)):
            yield place, moved


def _files(tree: Tree) -> Iterator[tuple[Path_, Tree]]:
    """The values that may name files."""
    for name, entry in _entries(tree, "data").items():
        yield from named_files(entry.tree, ("data", name))
    for section, key in (("models", "path"), ("nodes", "use")):
        for name, entry in _entries(tree, section).items():
            if key in entry.tree.entries:
                yield (section, name, key), entry.tree.entries[key].tree


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


def _path(value: str, old: Path, new: Path, coded: bool, of_model: bool) -> str:
    """The value as written from the new folder; empty where it names no file, or one from the root.

    What is `coded` names something in a file: `./file.py:Class`.
    """
    where, colon, cls = value.rpartition(":") if coded else (value, "", "")
    if not where or where.startswith(("/", "~")) or (coded and not where.endswith(".py")):
        return ""
    if of_model and not (where.startswith(("./", "../")) or (old / where).is_dir()):
        return ""
    return _relative(old / where, new) + colon + cls


def _relative(path: Path, folder: Path) -> str:
    there = os.path.relpath(path.resolve(), folder.resolve())
    return there if there.startswith("..") else f"./{there}"


def _edit(span: Span, value: str) -> _Edit:
    return _Edit(span.line, span.column, span.length, _scalar(value))


def _scalar(text: str) -> str:
    """The text as a string in YAML, in quotes where it would be something else."""
    is_plain = re.fullmatch(r"[\w./]([\w./:-]*[\w./-])?", text, re.ASCII) and isinstance(resolve(text), str)
    is_plain = is_plain and not is_date(text)
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
    """All of the files, or none."""
    new = [path for path in texts if not path.exists()]
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        for one in new:
            if one.is_file():
                one.unlink()
        above = next((one for one in path.parents if not one.is_dir() and (one.exists() or one.is_symlink())), None)
        reason = f"{above} is no folder" if above is not None else error.strerror
        raise ScaffoldError(f"cannot write {path}: {reason}") from error
    return list(texts)
