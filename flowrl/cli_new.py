"""The verb `new`: files to start from."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

FOLDER = typer.Option(help="Where to write; made if it is missing.")
new = typer.Typer(
    help="Write files to start from: a node with its test and its pipeline, or a pipeline. Nothing is overwritten.",
    no_args_is_help=True, rich_markup_mode="markdown",
)  # fmt: skip


class NodeKind(StrEnum):
    """Kinds of nodes that can be started from."""

    reward = "reward"
    advantage = "advantage"
    filter = "filter"
    metric = "metric"


@new.command("node")
def new_node(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the node and its module, such as `partial_credit`.")],
    kind: Annotated[
        NodeKind, typer.Option(help="What it does: score, compare scores, narrow what is trained, or only report.")
    ] = NodeKind.reward,
    folder: Annotated[Path, FOLDER] = Path(),
) -> None:
    """Write NAME.py, test_NAME.py and NAME.yaml: a class, its test, and the default pipeline with it.

    All three work as they are. Then change the class, and what follows from it.
    """
    from flowrl.tools import make_node

    raise typer.Exit(make_node(name, kind.value, folder))


@new.command("pipeline")
def new_pipeline(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the pipeline and its file.")],
    source: Annotated[
        str, typer.Option("--from", metavar="PIPELINE", help="A shipped pipeline, or a file of your own.")
    ] = "grpo_sync",
    folder: Annotated[Path, FOLDER] = Path(),
) -> None:
    """Write NAME.yaml, a copy of a pipeline's file to change, and a schema so that editors complete and check it.

    What the file extends the copy extends, too; `flowrl show NAME.yaml --as resolved` prints the whole.
    """
    from flowrl.tools import make_pipeline

    raise typer.Exit(make_pipeline(name, source, folder))
