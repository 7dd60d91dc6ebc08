"""The house rules that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.node import Node

ROOT = Path(__file__).parents[2]
ENGINE = [
    path
    for path in sorted((ROOT / "flowrl").rglob("*.py"))
    if path.relative_to(ROOT).parts[1] not in ("nodes", "pipelines")
]
LIBRARY = sorted((ROOT / "nodes").rglob("*.py"))
ALL = [*ENGINE, *LIBRARY]
MAX_FUNCTION, MAX_SCHEDULE, MAX_ENGINE_FILE, MAX_NODE_FILE = 60, 120, 300, 200
MODES = {"sync", "colocate_async", "separate_async"}

LIGHT = ("spec", "graph", "schedule", "data")
HEAVY = {"torch", "ray", "vllm", "mlflow", "transformers"}
CONTRACT = {"run", "send", "receive"} | vars(Node).keys()
"""Methods of a node: what they do is said by the class, how they are called by `flowrl.Node`."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(tree(path)) if isinstance(node, Function))


def size(node: Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_look_at() -> None:
    assert len(ENGINE) > 30
    assert len(LIBRARY) > 10


def test_files_are_short() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ALL}
    assert {shown(path): lines[path] for path in ENGINE if lines[path] > MAX_ENGINE_FILE} == {}
    assert {shown(path): lines[path] for path in LIBRARY if lines[path] > MAX_NODE_FILE} == {}


def test_functions_are_short() -> None:
    long = {
        f"{shown(path)}:{node.name}": size(node)
        for path in ALL
        for node in functions(path)
        if size(node) > MAX_FUNCTION
    }
    assert long == {}


def test_the_main_loop_fits_on_a_screen() -> None:
    (loop,) = (node for node in functions(ROOT / "flowrl/engine/loop.py") if node.name == "train")
    assert isinstance(loop, ast.AsyncFunctionDef)
    assert size(loop) <= MAX_FUNCTION


def test_schedules_are_short_and_nobody_else_asks_which_one_it_is() -> None:
    schedules = [path for path in ENGINE if path.parent.name == "schedule"]
    policies = [path for path in schedules if path.stem in {*MODES, "ahead"}]
    classes = [node for path in policies for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    assert {"Sync", "Ahead", "ColocateAsync", "SeparateAsync"} <= {node.name for node in classes}
    assert [node.name for node in classes if size(node) > MAX_SCHEDULE] == []
    asking = [
        f"{shown(path)}:{node.lineno}"
        for path in ALL
        if path not in schedules
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Compare | ast.match_case)
        and MODES & {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
    ]
    assert asking == []


def test_the_readme_leads_to_the_main_loop_at_once() -> None:
    blocks = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")
    paragraphs = [block for block in blocks if block.strip() and not block.lstrip().startswith(("#", "[![", "<"))]
    assert any("(flowrl/engine/loop.py" in paragraph for paragraph in paragraphs[:3])


def test_nothing_is_left_to_do() -> None:
    marks = re.compile("TO" + "DO|FIX" + "ME|XX" + "X")
    files = [
        path for path in ROOT.rglob("*.py") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]
    assert [shown(path) for path in files if marks.search(path.read_text(encoding="utf-8"))] == []


def test_what_others_may_use_says_what_it_does() -> None:
    assert [f"{shown(path)}:{name}" for path in ALL for name in undocumented(path)] == []


def undocumented(path: Path) -> Iterator[str]:
    """Public classes, functions and methods without a docstring, and the module if it has none."""
    module = tree(path)
    if module.body and not ast.get_docstring(module):
        yield "module"
    for node in module.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node):
                yield node.name
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                contract = path in LIBRARY and isinstance(method, Function) and method.name in CONTRACT
                if (
                    isinstance(method, Function)
                    and method.name[0] != "_"
                    and not contract
                    and not ast.get_docstring(method)
                ):
                    yield f"{node.name}.{method.name}"


def imported_at_the_top(path: Path) -> set[str]:
    """Packages that importing the module imports, except those for the type checker alone."""
    found: set[str] = set()
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", [*LIGHT, "nodes"])
def test_light_modules_import_nothing_heavy(package: str) -> None:
    folder = ROOT / package if package == "nodes" else ROOT / "flowrl" / package
    for path in folder.rglob("*.py"):
        allowed = {"torch", "transformers", "vllm"} if "_backend" in path.parts else set()
        assert imported_at_the_top(path) & HEAVY <= allowed, shown(path)
