"""The command line: one function a verb, no logic of its own.

Exit codes: 0 fine, 1 the run failed, 2 the pipeline is wrong, 130 interrupted.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="flowrl",
    help="LLM reinforcement learning as a typed dataflow graph.\n\n"
    "Start with `flowrl plan pipelines/grpo_sync.yaml` to see what would run, then `flowrl run` the same file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="Pipeline file (YAML).")]
Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. `--set batch.prompts=8`; VALUE is YAML."),
]


class View(StrEnum):
    """Forms in which a pipeline is shown."""

    tree = "tree"
    mermaid = "mermaid"
    json = "json"
    resolved = "resolved"


@app.command()
def run(
    file: File,
    sets: Sets = [],  # noqa: B006 - typer reads the default, nobody changes it
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps; same as `--set run.steps=N`.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is started.")] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Run everything in this process, one node at a time, for a debugger.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Join a Ray cluster (`auto` or host:port) instead of starting one."),
    ] = None,
) -> None:
    """Train: check the pipeline, start its pools, and run it."""
    from flowrl.commands import run_pipeline

    overrides = [*sets, *([f"run.steps={steps}"] if steps is not None else [])]
    raise typer.Exit(run_pipeline(file, overrides, dry_run=dry_run, local=local, address=address))


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Pipeline files (YAML).")],
    sets: Sets = [],  # noqa: B006
) -> None:
    """Check pipelines without starting anything; prints every problem with its place and its fix."""
    from flowrl.commands import check_pipelines

    raise typer.Exit(check_pipelines(files, sets))


@app.command()
def plan(file: File, sets: Sets = []) -> None:  # noqa: B006
    """Dry run: what would run where, with every field, its type, its shape, its writer and its readers."""
    from flowrl.commands import show_plan

    raise typer.Exit(show_plan(file, sets))


@app.command()
def show(
    file: File,
    sets: Sets = [],  # noqa: B006
    as_: Annotated[
        View, typer.Option("--as", help="Form of the picture; `resolved` prints the document with every default.")
    ] = View.tree,
) -> None:
    """Show the graph of a pipeline, or the document with every default."""
    from flowrl.commands import show_pipeline

    raise typer.Exit(show_pipeline(file, sets, as_.value))


@app.command()
def nodes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Library name, import path or file:Class.")
    ] = None,
) -> None:
    """List the library's nodes, or explain one: parameters, reads, writes."""
    from flowrl.commands import show_nodes

    raise typer.Exit(show_nodes(name))


@app.command()
def doctor() -> None:
    """Look at this machine: versions, CPUs, memory, accelerators, and what is missing."""
    from flowrl.commands import examine

    raise typer.Exit(examine())


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        from flowrl import __version__

        typer.echo(f"flowrl {__version__}")
        raise typer.Exit(0)


def main() -> None:
    """Entry point of the `flowrl` command: modules beside the current folder can be named in `use:`."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    app()
