"""What `flowrl plan --compare` does; returns an exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from flowrl.commands import FAILED, FINE, WRONG, checked, report, say
from flowrl.engine.setup import accelerators_here
from flowrl.errors import PipelineError, RunError, nearest
from flowrl.graph.plan import Plan
from flowrl.graph.show.text import WIDTH
from flowrl.run_files import known_runs, named_run
from flowrl.simulate.compare import Comparison, compare
from flowrl.simulate.costs import Costs
from flowrl.simulate.estimate import estimate
from flowrl.simulate.measured import BadRun, measured, read_log
from flowrl.simulate.page import as_html
from flowrl.simulate.report import as_data, as_text
from flowrl.simulate.variants import NotComparable


@dataclass(frozen=True)
class Wanted:
    """What is simulated."""

    costs: str | None
    """A run that costs are from; None for an estimate."""
    device: str | None
    """What workers have, for an estimate; None for what this machine has."""
    steps: int | None
    prompt_tokens: int | None
    response_tokens: int | None


def compare_schedules(
    file: Path, sets: Sequence[str], to_nodes: Sequence[str], wanted: Wanted, style: str, output: Path | None
) -> int:
    """`flowrl plan --compare`."""
    pipeline = checked(file, sets, to_nodes)
    try:
        plan = pipeline.plan()
        with Console(stderr=True).status("") as line:
            found = compare(plan, costs_of(plan, wanted), wanted.steps, lambda what: line.update(f"simulating {what}"))
    except PipelineError as error:
        return report(error.problems)
    except (BadRun, NotComparable) as error:
        say(f"error: {error}")
        return WRONG
    except RunError as error:
        say(f"the simulated run failed: {error}")
        return FAILED
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)  # a chart that is broken says nothing
    print(json.dumps(as_data(found), indent=2) if style == "json" else as_text(found, width))
    if output is not None and not _written(found, output):
        return WRONG
    return FINE


def costs_of(plan: Plan, wanted: Wanted) -> Callable[[Plan], Costs]:
    """What the costs of a variant of a plan are. Raises `BadRun`."""
    device = wanted.device or ("h100" if accelerators_here(False, None) else "cpu")

    def guess(variant: Plan) -> Costs:
        return estimate(variant, device, wanted.prompt_tokens, wanted.response_tokens)

    if wanted.costs is None:
        return guess
    root = plan.document.run.dir
    folder = named_run(wanted.costs, root)
    if folder is None:
        hint = nearest(wanted.costs, known_runs(root))
        raise BadRun(
            f"--costs: '{wanted.costs}' is no run, neither here nor in '{root}'" + (f" ({hint})" if hint else "")
        )
    log, name = read_log(folder), folder.name
    return lambda variant: measured(log, variant, name, guess(variant))


def _written(found: Comparison, output: Path) -> bool:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(as_html(found) + "\n", encoding="utf-8")
    except OSError as error:
        say(f"error: cannot write '{output}': {error.strerror or error}")
        return False
    say(f"written: {output}")
    return True
