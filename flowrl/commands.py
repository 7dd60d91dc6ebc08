"""What the verbs of the command line do; each returns an exit code."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import PipelineError, Problem, RunError
from flowrl.pipeline import load

FINE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


def run_pipeline(file: Path, sets: Sequence[str], *, dry_run: bool, local: bool, address: str | None) -> int:
    """`flowrl run`."""
    if dry_run:
        return show_plan(file, sets)
    if local and address is not None:
        say("error: --local runs in this process and joins no cluster; give one of --local and --address")
        return WRONG
    try:
        load(file, sets).run(local=local, address=address)
    except PipelineError as error:
        return report(error.problems)
    except RunError as error:
        say(f"run failed: {error}")
        return FAILED
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is over; nothing is left that could be interrupted
        say("interrupted: every worker has been ended")
        return INTERRUPTED
    return FINE


def check_pipelines(files: Sequence[Path], sets: Sequence[str]) -> int:
    """`flowrl check`."""
    code = FINE
    for file in files:
        pipeline = load(file, sets)
        wrong = report(pipeline.check())
        code = max(code, wrong)
        if not wrong:
            plan = pipeline.plan()
            print(f"{file}: fine, {len(plan.graph.nodes)} nodes in {len(plan.graph.levels)} levels")
    return code


def show_plan(file: Path, sets: Sequence[str]) -> int:
    """`flowrl plan`."""
    from flowrl.graph.draw import as_plan

    try:
        plan = load(file, sets).plan()
    except PipelineError as error:
        return report(error.problems)
    print(as_plan(plan))
    return report(plan.warnings)


def show_pipeline(file: Path, sets: Sequence[str], view: str) -> int:
    """`flowrl show`."""
    from flowrl.graph.draw import as_data, as_mermaid, as_tree

    pipeline = load(file, sets)
    try:
        if view == "resolved":
            code = report(pipeline.reading.problems)
            if code == FINE:
                print(pipeline.resolved(), end="")
            return code
        plan = pipeline.plan()
    except PipelineError as error:
        return report(error.problems)
    if view == "json":
        print(json.dumps(as_data(plan), indent=2))
    else:
        print(as_tree(plan) if view == "tree" else as_mermaid(plan))
    return FINE


def show_nodes(name: str | None) -> int:
    """`flowrl nodes`."""
    from flowrl.registry import BrokenNode, UnknownNode, find, library_names

    names = library_names() if name is None else [name]
    for one in names:
        try:
            cls = find(one, Path.cwd()).load()
        except (UnknownNode, BrokenNode) as error:
            say(f"error: {error}")
            return WRONG
        doc = (cls.__doc__ or "").strip()
        if name is None:
            print(f"{one:<24} {doc.splitlines()[0] if doc else ''}")
        else:
            print("\n".join(_explain(one, doc, cls)))
    return FINE


def _explain(name: str, doc: str, cls: Any) -> list[str]:
    """One node in full: what a user needs to write its line of YAML."""
    schema = cls.model_json_schema().get("properties", {})
    lines = [name, *(f"  {line.strip()}" if line.strip() else "" for line in doc.splitlines()), "", "parameters"]
    for key, field in cls.model_fields.items():
        default = "required" if field.is_required() else f"default {json.dumps(schema[key].get('default'))}"
        limits = [f"{word} {schema[key][word]}" for word in _LIMITS if word in schema[key]]
        choices = [" | ".join(map(str, schema[key]["enum"]))] if "enum" in schema[key] else []
        note = f"  {field.description}" if field.description else ""
        lines.append(f"  {key}: {', '.join([*choices, default, *limits])}{note}")
    lines += ["  none"] * (not cls.model_fields)
    lines += ["", "reads", *(f"  {port}" for port in cls.input_ports.values())]
    lines += ["writes", *(f"  {port}" for port in cls.output_ports.values())]
    model = f", {cls.weights} a model's weights" if cls.weights else ""
    pool = ", needs a pool of its own" if cls.device == "accelerator" else ""
    return [*lines, "", f"scope {cls.scope}{model}{pool}", f"source {sys.modules[cls.__module__].__file__}"]


_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength")


def examine() -> int:
    """`flowrl doctor`."""
    print(f"python        {platform.python_version()} on {platform.machine()}")
    missing = []
    for package in ("ray", "torch", "transformers", "accelerate", "pyarrow", "mlflow", "vllm"):
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


def report(problems: Any) -> int:
    """Print problems to the error stream; 2 if one of them is an error."""
    found: list[Problem] = list(problems)
    if found:
        say("\n\n".join(problem.render() for problem in found))
        errors = sum(problem.severity == "error" for problem in found)
        say(f"\n{errors} error{'s' * (errors != 1)}, {len(found) - errors} warning{'s' * (len(found) - errors != 1)}")
        return WRONG if errors else FINE
    return FINE


def say(text: str) -> None:
    """A line for people, on the error stream."""
    print(text, file=sys.stderr)
