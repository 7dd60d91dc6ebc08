"""`flowrl plan`: its options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from flowrl.cli_options import File, Sets, Style, ToNodes


class DeviceName(StrEnum):
    """What a worker may have, for costs that are estimated."""

    cpu = "cpu"
    a100 = "a100"
    h100 = "h100"


def plan(
    file: File,
    sets: Sets = [],  # noqa: B006 - typer reads the default, nobody changes it
    to_nodes: ToNodes = [],  # noqa: B006
    style: Annotated[Style, typer.Option("--format", help="`json` is a stable snapshot for tools.")] = Style.text,
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Length of a prompt that the sizes assume.")
    ] = None,
    response_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Length of a response that the sizes assume.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Simulate the three schedules on as many workers, and say which one pays and where it waits.",
        ),
    ] = False,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="`--compare`: what things take, from a run under `sync`: its folder, or its name."
        ),
    ] = None,
    device: Annotated[
        DeviceName | None,
        typer.Option(help="`--compare` without `--costs`: what workers have; else what this machine has."),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="`--compare`: steps to simulate; 50 if not given.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="PAGE", help="`--compare`: write a page with charts as HTML, too."),
    ] = None,
) -> None:
    """Dry run: what would run where, with every field, its shape and bytes, memory, FLOPs and batch arithmetic.

    `flowrl plan my.yaml --compare --costs RUN` tells which schedule pays.
    """
    if not compare:
        from flowrl.commands import say, show_plan

        given = {"--costs": costs, "--device": device, "--steps": steps, "--output": output}
        if lost := [name for name, value in given.items() if value is not None]:
            say(f"error: {lost[0]} says how to compare schedules; add --compare")
            raise typer.Exit(2)
        raise typer.Exit(show_plan(file, sets, to_nodes, style.value, prompt_tokens, response_tokens))
    from flowrl.comparing import Wanted, compare_schedules

    wanted = Wanted(costs, device.value if device is not None else None, steps, prompt_tokens, response_tokens)
    raise typer.Exit(compare_schedules(file, sets, to_nodes, wanted, style.value, output))
