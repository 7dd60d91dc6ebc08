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
import linecache
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

from pydantic.errors import PydanticUndefinedAnnotation

from flowrl.errors import NodeDefinitionError, nearest
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
    """The name in the document."""
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
        try:
            module = self._from_source() if self.file else importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and (self.module == error.name or self.module.startswith(error.name + ".")):
                raise UnknownNode(f"no module named '{error.name}'") from error
            raise BrokenNode(f"importing {self.file or self.module} failed: {error}") from error
        except NodeDefinitionError as error:
            raise BrokenNode(str(error)) from error
        except (Exception, SystemExit) as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = next((f", line {frame.lineno}," for frame in reversed(frames) if frame.filename == self.file), "")
            said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise BrokenNode(f"importing {self.file or self.module}{line} failed: {said}") from error
        found = getattr(module, self.name, None)
        if found is None:
            classes = [
                n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Node) and v is not Node
            ]
            raise UnknownNode(f"'{self.file or self.module}' has no class '{self.name}'; {nearest(self.name, classes)}")
        if not (isinstance(found, type) and issubclass(found, Node)):
            raise BrokenNode(f"'{self.name}' in {self.file or self.module} is no flowrl.Node")
        if "run" not in dir(found) and found.weights != "syncs":
            raise BrokenNode(f"{self.name} has no `run`")
        try:
            found.model_rebuild()
        except PydanticUndefinedAnnotation as error:
            raise BrokenNode(
                f"{self.name}: the type '{error.name}' of a parameter does not exist at the top of the module"
            ) from error
        return found

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


def find(use: str, folder: Path) -> NodeRef:
    """The reference for a `use:` value; `folder` is that of the YAML file. Raises `UnknownNode`."""
    where, colon, name = use.rpartition(":")
    if not colon:
        return _library(use)
    if where.endswith(".py"):
        return _from_file(use, folder / where, where, name)
    return NodeRef(use, where, name)


def library_names() -> list[str]:
    """Names of all library nodes, those of third parties included."""
    root = Path(__file__).parent / "nodes"
    files = (path.relative_to(root) for path in root.glob("*/*.py"))
    ours = [
        f"{path.parent.name}.{path.stem}" for path in files if not str(path).startswith("_") and path.stem[0] != "_"
    ]
    return sorted(ours + [entry.name for entry in importlib.metadata.entry_points(group=LIBRARY)])


def shipped_models() -> list[str]:
    """Names of the models that come with flowrl."""
    return sorted(path.name for path in (Path(__file__).parent / "nodes" / "assets").glob("*/"))


def _library(use: str) -> NodeRef:
    family, dot, stem = use.partition(".")
    path = Path(__file__).parent / "nodes" / family / f"{stem}.py"
    if dot and family.isidentifier() and stem.isidentifier() and "_" not in (family[0], stem[0]) and path.is_file():
        return NodeRef(use, f"{LIBRARY}.{family}.{stem}", "".join(part.capitalize() for part in stem.split("_")))
    for entry in importlib.metadata.entry_points(group=LIBRARY):
        if entry.name == use:
            return NodeRef(use, entry.module, entry.attr)
    raise UnknownNode(f"no library node is called '{use}'; {nearest(use, library_names())}")


def _from_file(use: str, path: Path, shown: str, name: str) -> NodeRef:
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        near = nearest(path.name, (other.name for other in path.parent.glob("*.py"))) if not path.exists() else ""
        raise UnknownNode(f"cannot read the file '{shown}': {reason}" + f"; {near}" * bool(near)) from error
    full = str(path.resolve())
    digest = hashlib.sha256(f"{full}\n{source}".encode()).hexdigest()[:12]
    return NodeRef(use, f"flowrl_file_{path.stem}_{digest}", name, full, source)
