"""What the schedules gain, measured on Ray with the fake engine and scripted nodes; and what the simulator foretells.

    python benchmarks/schedules.py [--case even] [--case tail] [--steps 24] [--charts]

`even`: generation and training take the same time; separate_async, with a worker for each, at most 0.6 of sync's step.
`tail`: one response in eight takes ten times as long, training 0.3 of sync's generation; colocate_async at most 0.7.
The simulator is given the costs of the sync run, as by `flowrl plan --compare --costs RUN`, and must foretell the mean
step of each run within 10 %. Needs a machine that is calm: nothing here computes, everything waits for the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from pydantic import PrivateAttr

from flowrl import Node, Token
from flowrl.node import Context

SIMULATED_STEPS = 200
PRECISION = 0.1
"""Largest error of a prediction, as a share of what was measured."""


class Train(Node):
    """Takes its time, as an update would."""

    scope = "batch"
    weights = "updates"
    pure = False
    device = "accelerator"

    seconds: float = 0.1
    """Of a batch."""
    minibatch: int = 1
    """What an update says of its steps."""

    def run(self, response_mask: Token[bool], advantages: Token[float]) -> None:
        time.sleep(self.seconds)


class Push(Node):
    """Sends nothing but the version, and quickly."""

    weights = "syncs"
    pure = False
    device = "accelerator"

    _context: Context = PrivateAttr()

    def setup(self, context: Context) -> None:
        self._context = context

    def receiver(self) -> None:
        """Says nothing."""

    def send(self, receivers: Any) -> Iterator[None]:
        yield None

    def receive(self, part: Any, version: int) -> None:
        from flowrl.nodes._backend.engine import engines_of

        for engine in engines_of(self._context).values():
            engine.begin_update(part)  # a fake engine looks at no weights
            engine.finish_update(version)


@dataclass(frozen=True)
class Case:
    """Two schedules, and what the second one may take of the first."""

    name: str
    group: int
    script: dict[str, Any]
    train_seconds: float
    schedule: dict[str, Any]
    budget: float
    apart: bool = False


CASES = [
    Case("even", 4, {"seconds": [0.5]}, 0.5, {"mode": "separate_async", "max_staleness": 1}, 0.6, apart=True),
    Case(
        "tail", 8, {"seconds": [0.1], "slow": 0.125, "slow_factor": 10}, 0.3,
        {"mode": "colocate_async", "max_staleness": 2}, 0.7,
    ),
]  # fmt: skip


def main() -> int:
    """Print what was foretold and what was measured; 1 where a budget is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="all if not given")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--charts", action="store_true", help="show who worked when, too")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if not options.case or case.name in options.case:
                missed += measure(case, options.steps, Path(folder), charts=options.charts)
    return bool(missed)


def measure(case: Case, steps: int, folder: Path, *, charts: bool) -> int:
    """Run a case under both schedules; the number of budgets that it misses."""
    from flowrl.pipeline import Pipeline
    from flowrl.simulate.estimate import estimate
    from flowrl.simulate.measured import measured, read_log
    from flowrl.simulate.run import simulate
    from flowrl.simulate.variants import team_of, under

    log, missed, found = None, 0, list[float]()
    for schedule in ({"mode": "sync"}, case.schedule):
        pipeline = Pipeline(document(case, schedule, steps, folder))
        plan = pipeline.plan()
        result = pipeline.run(quiet=True)
        log = log or read_log(result.folder)
        base, team = team_of(plan)
        variant = under(base, team, plan.document.schedule, SIMULATED_STEPS)
        outcome = simulate(variant, team, measured(log, variant, "the sync run", estimate(variant, "cpu")))
        seconds = mean(step["time/step"] for step in result.metrics[min(5, steps // 4) :])
        error = outcome.step_seconds / seconds - 1
        found.append(seconds)
        print(
            f"{case.name:5} {schedule['mode']:15} predicted {outcome.step_seconds:6.3f} s   "
            f"measured {seconds:6.3f} s   error {100 * error:+5.1f} %   of sync {seconds / found[0]:.2f}",
            flush=True,
        )
        missed += abs(error) > PRECISION
        if charts:
            print("\n".join(chart_of(result.folder)), flush=True)
    late = found[1] > case.budget * found[0]
    print(f"{case.name:5} budget {case.budget} of sync: {'missed' if late else 'kept'}")
    return missed + late


def chart_of(folder: Path) -> Iterator[str]:
    """Who worked when in three steps of a run, by its event log: what trains has the worker, else what generates."""
    from flowrl.simulate.gantt import Bar, Chart, as_text

    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    ends = {event["step"]: event["end"] for event in events if event["node"] == "sync"}
    first = max(1, len(ends) // 2)
    start, last = ends[first - 1] if first > 1 else 0.0, ends[first + 2]
    workers: dict[str, list[Bar]] = {event["worker"]: [] for event in events}
    for event in sorted(events, key=lambda event: (event["node"] == "rollout", event["start"])):
        begin, end, bars = max(event["start"], start) - start, min(event["end"], last) - start, workers[event["worker"]]
        for bar in sorted(bars, key=lambda bar: bar.start):  # a pause is not in the log, and calls overlap
            if event["node"] == "rollout" and bar.end > begin and bar.start < end:
                bars += [Bar("rollout", event["step"], begin, bar.start)] * (bar.start > begin)
                begin = bar.end
        bars += [Bar(event["node"], event["step"], begin, end)] * (end > begin)
    step_ends = tuple(ends[step] - start for step in range(first, first + 3))
    drawn = Chart("", first, last - start, step_ends, dict(sorted(workers.items())), 0)
    letters = {"rollout": "R", "reward": "W", "advantage": "A", "update": "U", "sync": "S"}
    yield from as_text(drawn, letters, 100)


def document(case: Case, schedule: dict[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    """The pipeline of a case; all workers fit on two cores."""
    own = os.path.abspath(__file__)
    apart = case.apart and schedule["mode"] != "sync"
    return {
        "flowrl": 1,
        "name": f"{case.name}_{schedule['mode']}",
        "models": {"policy": {"path": "arith-tiny", "trainable": True}},
        "data": {"train": {"type": "arithmetic", "size": 4096}},
        "batch": {"prompts": 8, "group": case.group},
        "pools": {
            "train": {"workers": 1, "cpus_per_worker": 0.5},
            "generate": {"workers": 1, "cpus_per_worker": 0.5} if apart else {"shares": "train"},
        },
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 4,
                "script": case.script,
            },
            "reward": {"use": "reward.exact_match"},
            "advantage": {"use": "advantage.grpo"},
            "update": {"use": f"{own}:Train", "model": "policy", "pool": "train", "seconds": case.train_seconds},
            "sync": {"use": f"{own}:Push", "model": "policy"},
        },
        "schedule": schedule,
        "run": {"steps": steps, "dir": str(folder), "samples": {"rows": 0}},
        "tracking": {"type": "none"},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
