"""Finding node classes by name: library name, import path, or file.

`reward.exact_match` is class `ExactMatch` in the library's `reward/exact_match.py`, so nothing else is imported to find
it. `my_pkg.nodes:LengthPenalty` is an import path. `./my_nodes.py:LengthPenalty` is a file, relative to the YAML; its
source travels with the reference, so the class can be made again in a worker on another machine. Third parties add
library names by the entry-point group `flowrl.nodes`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import linecache
import os
import sys
import traceback
import types
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pydantic
from pydantic import ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from flowrl.errors import NodeDefinitionError, closest, nearest
from flowrl.model import default_values
from flowrl.node import Node

LIBRARY = "flowrl.nodes"


class UnknownNode(LookupError):
    """Nothing goes by this name; the message says what is near."""


class BrokenNode(Exception):
    """The class was found but cannot be used; the message says why."""


@dataclass(frozen=True)
class NodeRef:
    """Where a node class comes from; small and picklable, `load` gives the class in any process."""

    use: str
    """The name in the document, as pages show it."""
    module: str
    """Module that defines the class."""
    name: str
    """Name of the class in it."""
    file: str = ""
    """File of the class, if it was named by file."""
    source: str = ""
    """Text of that file."""

    def load(self) -> type[Node]:
        """The class. Raises `UnknownNode` or `BrokenNode`."""
        module = self.imported()
        found = getattr(module, self.name, None)
        if found is None:
            known = nearest(self.name, node_classes(module)) or "it has no node class"
            raise UnknownNode(f"'{self.file or self.module}' has no class '{self.name}'; {known}")
        if not (isinstance(found, type) and issubclass(found, Node)):
            raise BrokenNode(f"'{self.name}' in {self.file or self.module} is no flowrl.Node")
        if "run" not in dir(found) and found.weights != "syncs":
            raise BrokenNode(f"{_place(found)}{self.name} has no `run`")
        try:
            found.model_rebuild()
        except PydanticUndefinedAnnotation as error:
            fact = f"the type '{error.name}' of a parameter does not exist at the top of the module"
            raise BrokenNode(f"{_place(found)}{self.name}: {fact}") from error
        except PydanticUserError as error:
            raise BrokenNode(f"{_place(found)}{self.name}: {_first_line(error)}") from error
        if fault := _unwritable(found):
            raise BrokenNode(f"{_place(found)}{self.name}: {fault}")
        return found

    def imported(self) -> types.ModuleType:
        """The module of the class. Raises `UnknownNode` or `BrokenNode`."""
        where = self.file or self.module
        try:
            return self._from_source() if self.file else importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and (self.module == error.name or self.module.startswith(error.name + ".")):
                raise UnknownNode(f"no module named '{error.name}'") from error
            raise BrokenNode(f"importing {where} failed: {error}") from error
        except NodeDefinitionError as error:
            place = "".join(f"{frame.filename}:{frame.lineno}: " for frame in _frames(error)[-1:])
            raise BrokenNode(f"{place}{error}") from error
        except (Exception, SystemExit) as error:
            frames = _frames(error)
            lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename][-1:]
            line = "".join(f", line {line}" + f" of {frames[0].filename}" * (not self.file) + "," for line in lines)
            raise BrokenNode(f"importing {where}{line} failed: {type(error).__name__}: {_first_line(error)}") from error

    def _from_source(self) -> types.ModuleType:
        if self.module in sys.modules:
            return sys.modules[self.module]
        module = types.ModuleType(self.module)
        module.__file__ = self.file
        sys.modules[self.module] = module
        lines = self.source.splitlines(keepends=True)
        linecache.cache[self.file] = (len(self.source), None, lines, self.file)
        try:
            exec(compile(self.source, self.file, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The way of an error through the user's code: without the frames of the import and of making a class."""
    here = Path(__file__).parent
    others = {__file__, *(str(here / name) for name in ("node.py", "ports.py", "evaluation.py")), importlib.__file__}
    machinery = ("<", f"{Path(pydantic.__file__).parent}{os.sep}")
    frames = traceback.extract_tb(error.__traceback__)
    return [one for one in frames if one.filename not in others and not one.filename.startswith(machinery)]


def _place(cls: type[Node]) -> str:
    """`file:line: ` of a class; empty where its source is not there."""
    try:
        return f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}: "
    except (OSError, TypeError):
        return ""


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _unwritable(cls: type[Node]) -> str:
    """Which parameter has a name or a default that YAML cannot hold; the resolved document shows all of them."""
    for name, field in cls.model_fields.items():
        if field.alias is not None or field.validation_alias is not None:
            return f"parameter '{name}' has an alias; give the parameter itself that name"
    defaults: list[str] = []
    for name in cls.model_fields:
        try:
            made = {one: value for one, value in default_values(cls, name).items() if value is not None}
            defaults += (f"{json.dumps(one)}: {json.dumps(value)}" for one, value in made.items())
        except Exception as error:  # of a user's type, serializer or default factory
            return f"the default of parameter '{name}' has no form in YAML: {_first_line(error)}"
    try:
        cls.model_validate_json(f"{{{', '.join(defaults)}}}")
    except ValidationError as error:
        for one in error.errors():
            required = one["type"] == "missing" and len(one["loc"]) == 1
            if one["loc"] and not required:  # without a place it is about several parameters
                return f"the default of '{'.'.join(map(str, one['loc']))}' is wrong: {one['msg']}, not {one['input']!r}"
    except Exception:  # a validator's own; told where the node is bound
        return ""
    return ""


def node_classes(module: types.ModuleType) -> list[str]:
    """Names of the node classes that a module defines, or imports from elsewhere."""
    return [
        name
        for name, one in vars(module).items()
        if isinstance(one, type) and issubclass(one, Node) and one is not Node
    ]


def find(use: str, folder: Path) -> NodeRef:
    """The reference for a `use:` value; `folder` is that of the YAML file.

    Raises `UnknownNode`, and `BrokenNode` for a file without a class whose classes cannot be listed.
    """
    where, colon, name = use.rpartition(":")
    if not colon and not use.endswith(".py"):
        return _library(use)
    if not where or not name:
        raise UnknownNode(_without_class(use, folder))
    if where.endswith(".py"):
        return ref_to_file(use, folder / where, where, name)
    if not all(part.isidentifier() for part in where.split(".")):
        raise UnknownNode(f"'{where}' is neither a module, such as my_pkg.nodes, nor a file, such as ./my_nodes.py")
    return NodeRef(use, where, name)


def _without_class(use: str, folder: Path) -> str:
    """What to say of a module or a file that is named alone."""
    where = use.removesuffix(":")
    if not where.endswith(".py"):
        return f"'{use}' names no class: write a library name, my_pkg.nodes:Class or ./my_nodes.py:Class"
    classes = node_classes(ref_to_file(use, folder / where, where, "").imported())
    example = f"{where}:{classes[0] if classes else 'Class'}"
    known = f"its node classes: {', '.join(classes)}" if classes else "it has no node class"
    return f"'{use}' names a file and no class in it: write {example}; {known}"


@cache
def _added() -> tuple[importlib.metadata.EntryPoint, ...]:
    """What other packages add to the library; read once, for all their metadata is searched."""
    return tuple(importlib.metadata.entry_points(group=LIBRARY))


def library_names() -> list[str]:
    """Names of all library nodes, those of third parties included."""
    return sorted(own_names() + [entry.name for entry in _added()])


def own_names() -> list[str]:
    """Names of the library nodes that come with flowrl."""
    root = Path(__file__).parent / "nodes"
    files = (path.relative_to(root) for path in root.glob("*/*.py"))
    return sorted(
        f"{path.parent.name}.{path.stem}" for path in files if not str(path).startswith("_") and path.stem[0] != "_"
    )


def _library(use: str) -> NodeRef:
    family, dot, stem = use.partition(".")
    module, _, name = use.rpartition(".")
    path = Path(__file__).parent / "nodes" / family / f"{stem}.py"
    if dot and family.isidentifier() and stem.isidentifier() and "_" not in (family[0], stem[0]) and path.is_file():
        return NodeRef(use, f"{LIBRARY}.{family}.{stem}", "".join(part.capitalize() for part in stem.split("_")))
    for entry in _added():
        if entry.name == use:
            return NodeRef(use, entry.module, entry.attr)
    near, names = f"did you mean '{module}:{name}'?", library_names()
    near = near if not closest(use, names) and _is_module(module) else nearest(use, names)
    raise UnknownNode(f"no library node is called '{use}'; {near}")


def _is_module(name: str) -> bool:
    """Whether Python finds a module of that name; nothing of it is run but the packages that it lies in."""
    if not name or not all(part.isidentifier() for part in name.split(".")):
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # of a package that cannot be imported
        return False


def ref_to_file(use: str, path: Path, shown: str, name: str, text: str | None = None) -> NodeRef:
    """A reference to a name in a file, whose text is read unless it is given. Raises `UnknownNode`."""
    try:
        source = path.read_text(encoding="utf-8") if text is None else text
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        missing = isinstance(error, FileNotFoundError)
        near = nearest(path.name, (other.name for other in path.parent.glob("*.py"))) if missing else ""
        raise UnknownNode(f"cannot read the file '{shown}': {reason}" + f"; {near}" * bool(near)) from error
    full = str(path.resolve())
    digest = hashlib.sha256(f"{full}\n{source}".encode()).hexdigest()[:12]
    return NodeRef(use, f"flowrl_file_{path.stem}_{digest}", name, full, source)
