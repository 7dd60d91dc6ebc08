"""`flowrl export`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Folder of a run, its name in `--runs`, or a folder of a checkpoint.")
    ],
    step: Annotated[int | None, typer.Option(min=1, help="Step of the checkpoint; without it, the newest one.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="Where to write; else `exported/step_S` in the run folder."
        ),
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter alone instead of merging it into the model.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which model, where the run trains several.")
    ] = None,
    runs: Annotated[str, typer.Option(metavar="FOLDER", help="Where runs are looked for by name.")] = "runs",
) -> None:
    """Write the trained model of a run as a Hugging Face folder: config, safetensors, tokenizer, chat template.

    `flowrl export grpo_sync-20260101-120000 -o my-model`; then `from_pretrained("my-model")`, or `vllm serve my-model`.
    """
    from flowrl.export import export_run

    raise typer.Exit(export_run(run, step, output, adapter, model, runs))
