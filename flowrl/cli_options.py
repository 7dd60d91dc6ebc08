"""Options that several verbs have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

File = Annotated[Path, typer.Argument(metavar="FILE", help="Pipeline file (YAML).")]
Sets = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override one value, e.g. `--set batch.prompts=8`; VALUE is YAML."),
]
ToNodes = Annotated[
    list[str],
    typer.Option("--to-nodes", metavar="NODE", help="Keep only this node and what it needs; may be repeated."),
]


class Style(StrEnum):
    """Forms of an answer: for people, or for tools."""

    text = "text"
    json = "json"
