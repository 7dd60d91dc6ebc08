"""What the verbs of the command line do; each returns an exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from flowrl.errors import PipelineError, Problem, RunError
from flowrl.pipeline import Pipeline, load

FINE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


def run_pipeline(
    file: Path,
    sets: Sequence[str],
    to_nodes: Sequence[str],
    *,
    dry_run: bool,
    local: bool,
    address: str | None,
    resume: str | None,
) -> int:
    """`flowrl run`."""
    if local and address is not None:
        say("error: --local runs in this process and joins no cluster; give one of --local and --address")
        return WRONG
    try:
        pipeline = load(file, sets, to_nodes)
        if dry_run:
            return _rehearse(pipeline, local=local, address=address, resume=resume)
        pipeline.run(local=local, address=address, resume=resume)
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


def _rehearse(pipeline: Pipeline, *, local: bool, address: str | None, resume: str | None) -> int:
    """`flowrl run --dry-run`: the page of `flowrl plan`, and what a run would find on this machine or cluster."""
    from flowrl.launch import rehearse
    from flowrl.resume import where_to_start

    print(pipeline.draw("plan"))
    start = where_to_start(pipeline.plan(), pipeline.reading, pipeline.resolved(), resume)
    print(f"\ncluster\n  {rehearse(pipeline.plan(), pipeline.reading, local=local, address=address, start=start)}")
    return report(pipeline.check())


def checked(file: Path, sets: Sequence[str], to_nodes: Sequence[str] = ()) -> Pipeline:
    """The pipeline, checked. What modules of the user's print goes to the error stream: an answer may be JSON."""
    with contextlib.redirect_stdout(sys.stderr):
        pipeline = load(file, sets, to_nodes)
        pipeline.check()
    return pipeline


def check_pipelines(
    files: Sequence[Path], sets: Sequence[str], to_nodes: Sequence[str], *, strict: bool, style: str
) -> int:
    """`flowrl check`."""
    code, problems = FINE, list[Problem]()
    for file in files:
        pipeline = checked(file, sets, to_nodes)
        found = pipeline.check()
        wrong = any(problem.severity == "error" or strict for problem in found)
        code = WRONG if wrong else code
        problems += found
        if style == "text":
            report(found, strict)
            graph = None if wrong else pipeline.plan().graph
            if graph is not None:
                print(f"{file}: fine, {len(graph.nodes)} nodes in {len(graph.levels)} levels")
    if style == "json":
        data = {"format": 1, "fine": code == FINE, "problems": [problem.as_data() for problem in problems]}
        print(json.dumps(data, indent=2))
    if style == "github":
        for problem in problems:
            print(problem.as_github())
    return code


def show_plan(
    file: Path,
    sets: Sequence[str],
    to_nodes: Sequence[str],
    style: str,
    prompt_tokens: int | None,
    response_tokens: int | None,
) -> int:
    """`flowrl plan`."""
    pipeline = checked(file, sets, to_nodes)
    try:
        view = "plan" if style == "text" else "json"
        print(pipeline.draw(view, prompt_tokens=prompt_tokens, response_tokens=response_tokens))
    except PipelineError as error:
        return report(error.problems)
    return report(pipeline.check())


def show_pipeline(
    file: Path, sets: Sequence[str], to_nodes: Sequence[str], view: str, unroll: int | None, output: Path | None
) -> int:
    """`flowrl show`."""
    from flowrl.graph.show.picture import PictureError

    pipeline = checked(file, sets, to_nodes)
    try:
        if view == "resolved" and report(pipeline.reading.problems):
            return WRONG
        text = pipeline.draw(view, unroll=unroll, color=output is None and _in_color())
    except PipelineError as error:
        return report(error.problems)
    except PictureError as error:
        say(f"error: {error}")
        return WRONG
    if output is None:
        print(text)
        return FINE
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        say(f"error: cannot write '{output}': {error.strerror or error}")
        return WRONG
    say(f"written: {output}")
    return FINE


def _in_color() -> bool:
    """Whether the terminal wants colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show_difference(before: Path, after: Path, sets: Sequence[str], style: str, exit_code: bool) -> int:
    """`flowrl diff`."""
    from flowrl.graph.diff import as_data, as_text

    pipelines = [checked(file, sets) for file in (before, after)]
    codes = [report(p for p in pipeline.check() if p.severity == "error") for pipeline in pipelines]
    if any(codes):
        return WRONG
    changes = pipelines[0].diff(pipelines[1])
    print(json.dumps(as_data(changes), indent=2) if style == "json" else as_text(changes))
    return FAILED if changes and exit_code else FINE


def report(problems: Iterable[Problem], strict: bool = False) -> int:
    """Print problems to the error stream; 2 if one of them is an error, or with `strict` if there is any."""
    found = list(problems)
    errors = sum(problem.severity == "error" for problem in found)
    warnings = len(found) - errors
    if found:
        say("\n\n".join(problem.render() for problem in found))
        counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        say(f"\n{counts}{', which --strict counts as errors' if strict and warnings else ''}")
    return WRONG if errors or (strict and found) else FINE


def say(text: str) -> None:
    """A line for people, on the error stream."""
    print(text, file=sys.stderr)
