"""What the helping verbs of the command line do; each returns an exit code.

The verbs that work on a pipeline are in `flowrl.commands`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.commands import FAILED, FINE, WRONG, report, say
from flowrl.errors import PipelineError, Place, Problem, nearest
from flowrl.registry import BrokenNode, UnknownNode, find, library_names

if TYPE_CHECKING:
    from rich.table import Table

    from flowrl.catalogue import Entry, Read
    from flowrl.node import Node
    from flowrl.scaffold import Kind
    from flowrl.testing.faults import Verdict

WIDTH, NAME_WIDTH = 100, 28


def show_nodes(name: str | None, style: str) -> int:
    """`flowrl nodes`."""
    from flowrl.catalogue import entry_of

    entries: list[Entry] = []
    for one in library_names() if name is None else [name]:
        try:
            entries.append(entry_of(one, Path.cwd()))
        except (UnknownNode, BrokenNode) as error:
            say(f"error: {error}" if name is not None else f"{one} cannot be used: {error}")
    if name is not None and not entries:
        return WRONG
    if style == "json":
        print(json.dumps({"nodes": [entry.as_data() for entry in entries]}, indent=2, ensure_ascii=False))
    elif name is None:
        _print_catalogue(entries)
    else:
        _print_page(entries[0])
    return FINE


def _print(*parts: object) -> None:
    """Tables and marked text, as wide as the terminal up to `WIDTH`; plain where there is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    console.width = min(console.width, WIDTH) if console.is_terminal else WIDTH
    with console.capture() as capture:
        console.print(*parts, sep="\n")
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def _table(rows: Iterable[Sequence[str]], *columns: str, widths: Sequence[int] = ()) -> Table:
    """Rows of text; without columns there is no header, and the first cell gives way to no other."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(columns), header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    texts = [[Text(cell) for cell in row] for row in rows]
    for position, width in enumerate(widths or [None] * max(map(len, texts), default=0)):
        name = columns[position] if columns else ""
        table.add_column(name, style=None if position else "bold", no_wrap=not position, width=width)
    for row in texts:
        table.add_row(*row)
    return table


def _print_catalogue(entries: Sequence[Entry]) -> None:
    """What each node does, reads and writes, family by family; a long name stands above its line."""
    rows: list[tuple[str, ...]] = []
    for family, members in groupby(entries, key=lambda entry: entry.use.rpartition(".")[0]):
        rows += [("", "", "", "")] * bool(rows) + [(family, "", "", "")]
        for entry in members:
            read, name = " ".join(read.name + "?" * read.optional for read in entry.reads), f"  {entry.use}"
            rows += [(name,)] * (is_long := len(name) > NAME_WIDTH)
            rows.append(("" if is_long else name, entry.summary, read, " ".join(entry.writes)))
    columns: tuple[str, ...] = ("node", "what it does", "reads", "writes")
    for is_name, part in groupby(rows, key=lambda row: len(row) == 1):
        _print(_table(part, *columns, widths=() if is_name else (NAME_WIDTH, 88 - NAME_WIDTH - 19 - 18, 19, 18)))
        columns = ()
    print("\n`?` is optional. `flowrl nodes NAME` explains one: its parameters, its types, a line to paste.")


def _print_page(entry: Entry) -> None:
    """One node in full: what a user needs to write its line of YAML."""
    from rich.text import Text

    parameters = [(p.name, f"{p.type} {p.limits}", p.default or "required", p.description) for p in entry.parameters]
    critic = ", a critic: `head: value`" * (entry.head == "value")
    kind = {
        "scope": f"{entry.scope}: it is called with {_SCOPES[entry.scope]}",
        "weights": f"{entry.weights} those of its `model:`{critic}" if entry.weights else "uses no model",
        "cardinality": f"{entry.cardinality} rows",
        "pure": "yes: it may run again after a failure" if entry.pure else "no: it is never run twice",
        "device": "accelerator: it needs a `pool:`" if entry.device == "accelerator" else "cpu: it runs on any pool",
    }
    tables = {
        "parameters": parameters and _table(parameters, "name", "type", "default", "what"),
        "reads": entry.reads and _table((read.name, read.type, _when(read)) for read in entry.reads),
        "writes": entry.writes and _table(entry.writes.items()),
        "kind": _table(kind.items()),
    }
    _print(f"[bold cyan]{entry.use}[/]", Text(entry.docstring))
    for title, table in tables.items():
        _print(f"\n[cyan]{title}[/]", table or "none")
    print(f"\nsource\n{entry.source}\n\na line to paste under `nodes:`\n  {entry.snippet}")


_SCOPES = {
    "sample": "any samples",
    "group": "whole groups",
    "batch": "the batch that the schedule cuts",
    "step": "the whole step, on one worker",
}


def _when(read: Read) -> str:
    if not read.optional:
        return ""
    if not read.switched_by:
        return "optional: read if some node writes it"
    now = {True: "read", False: "not read", None: "read if written"}[read.read_by_default]
    return f"optional: {', '.join(read.switched_by)} decides; {now} with the defaults"


def print_schema(files: Sequence[Path], output: Path | None) -> int:
    """`flowrl schema`."""
    from flowrl.spec.load import load_file
    from flowrl.spec.schema import nodes_used, schema_text

    loaded = [load_file(file, str(file)) for file in files]
    unread = [problem for one in loaded if one.tree is None for problem in one.problems]
    if unread:
        return report(unread)
    used = nodes_used(one.tree for one in loaded if one.tree is not None)
    for note in used.notes:
        say(f"note: {note}")
    text = schema_text(used.classes)
    if output is None:
        print(text, end="")
        return FINE
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        say(f"error: cannot write {output}: {error.strerror}")
        return WRONG
    say(f"wrote {output}")
    return FINE


def make_node(name: str, kind: Kind, folder: Path) -> int:
    """`flowrl new node`."""
    from flowrl.scaffold import ScaffoldError, new_node

    try:
        class_file, test_file, pipeline = new_node(name, kind, folder)
    except ScaffoldError as error:
        say(f"error: {error}")
        return WRONG
    _told([class_file, test_file, pipeline], [
        (("pytest", test_file), "its test, without an engine"),
        (("flowrl", "check", pipeline), "the pipeline that uses it"),
        (("flowrl", "run", pipeline, "--steps", "2"), "two training steps"),
    ])  # fmt: skip
    return FINE


def make_pipeline(name: str, source: str, folder: Path) -> int:
    """`flowrl new pipeline`."""
    from flowrl.scaffold import ScaffoldError, new_pipeline

    try:
        pipeline, schema = new_pipeline(name, source, folder)
    except ScaffoldError as error:
        say(f"error: {error}")
        return WRONG
    except PipelineError as error:
        return report(error.problems)
    _told([pipeline, schema], [
        (("flowrl", "check", pipeline), "whether all is well"),
        (("flowrl", "plan", pipeline), "what would run where"),
        (("flowrl", "schema", pipeline, "--output", schema), "again when it uses new nodes of yours"),
    ])  # fmt: skip
    return FINE


def _told(files: Sequence[Path], commands: Sequence[tuple[Sequence[str | Path], str]]) -> None:
    print("wrote", *(f"  {file}" for file in files), "", "try", sep="\n")
    shown = {shlex.join(map(str, command)): why for command, why in commands}
    wide = max(map(len, shown))
    for command, why in shown.items():
        print(f"  {command:<{wide}}  # {why}")


def try_node(use: str, sets: Sequence[str], seed: int) -> int:
    """`flowrl test-node`."""
    from flowrl.catalogue import smallest_parameters
    from flowrl.encode import dumps
    from flowrl.testing.contract import verdicts

    try:
        cls = find(use, Path.cwd()).load()
    except (UnknownNode, BrokenNode) as error:
        say(f"error: {error}")
        return WRONG
    smallest = smallest_parameters(cls)
    node, given, problems = _made(cls, smallest, sets)
    if node is None:
        return report(problems)
    print(use, *(f"{key}={dumps(value)}" for key, value in given.items()))
    for key in [key for key in smallest if key not in given]:
        print(f"  {key}={dumps(smallest[key])} is the smallest allowed; --set {key}=... for another")
    if node.weights == "syncs":
        print("  a sync has no `run` to try: it is tested by a run of a pipeline")
        return FINE
    found = verdicts(node, seed=seed)
    print(*(line for verdict in found for line in _lines(verdict)), sep="\n")
    num_failed = sum(verdict.holds is False for verdict in found)
    num_held = sum(verdict.holds is True for verdict in found)
    print(f"{num_held} of {num_held + num_failed} properties hold")
    return FAILED if num_failed else FINE


def _made(
    cls: type[Node], smallest: Mapping[str, Any], sets: Sequence[str]
) -> tuple[Node | None, dict[str, Any], list[Problem]]:
    """The node with these settings, what was given, and what is wrong with it; no node if anything is."""
    from flowrl.spec.codes import UNKNOWN_KEY
    from flowrl.spec.merge import overlay
    from flowrl.spec.tree import Path_, Source, Span, Tree, locate, plain
    from flowrl.spec.validate import repair

    tree, problems = overlay(sets, Tree({}, Span(Source("--set"))))
    assert tree is not None
    given = plain(tree)

    def place(path: Path_, key: bool = False) -> Place:
        return locate(tree, path, key).place(path)

    for name in given.keys() - cls.model_fields.keys():
        fix = nearest(name, cls.model_fields) or f"{cls.__name__} has none at all"
        problems.append(Problem(UNKNOWN_KEY, place((name,), True), f"{cls.__name__} has no parameter '{name}'", fix))
    known = {name: value for name, value in given.items() if name in cls.model_fields}
    node, wrong, _ = repair(cls, {**smallest, **known}, place)
    problems = [*problems, *wrong]
    return None if problems else node, given, problems


def _lines(verdict: Verdict) -> Iterator[str]:
    word = {True: "ok", False: "FAILED", None: "-"}[verdict.holds]
    first, *more = verdict.details.split("\n")
    if verdict.holds is False:
        yield f"  {word:<6}  {verdict.name}"
        yield from (f"            {line}" for line in (first, *more))
    else:
        yield f"  {word:<6}  {verdict.name}" + (f": {first}" if first else "")


def examine() -> int:
    """`flowrl doctor`."""
    print(f"python        {platform.python_version()} on {platform.machine()}")
    missing = []
    for package in ("ray", "torch", "transformers", "peft", "pyarrow", "mlflow", "vllm"):
        try:
            print(f"{package:<13} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            optional = package in ("mlflow", "vllm")
            print(f"{package:<13} not installed" + (" (optional)" if optional else ""))
            missing += [] if optional else [package]
    print(f"cpu           {len(os.sched_getaffinity(0))} cores")
    print(f"memory        {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB")
    shared = shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    print(f"object store  {shared:.1f} GiB free in /dev/shm")
    print(f"disk          {shutil.disk_usage('.').free / 2**30:.1f} GiB free here")
    if "torch" not in missing:
        import torch

        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        print(f"accelerators  {', '.join(gpus) or 'none: models run on CPU workers'}")
    if missing:
        say(f"missing: {', '.join(missing)}")
        return FAILED
    print("all that the default pipeline needs is here")
    return FINE
