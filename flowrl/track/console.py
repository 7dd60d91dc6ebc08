"""What a person sees of a run: what is being waited for, a line a step, warnings as they come, and a final table.

On a terminal a live line with a bar stays below the lines of the steps; into a pipe or a file go the same lines, plain.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from flowrl.schedule.record import Event, Level, Recorder, Status
from flowrl.track.validation import Validations, lines_of

NUM_ENDS = 5
"""Steps at either end that the final table compares."""

Format = Callable[[float], str]
STEP_PARTS: tuple[tuple[str, str, Format], ...] = (
    ("reward ", "reward/mean", "{:.3f}".format),
    ("loss ", "actor/loss", "{:>8.3g}".format),
    ("", "throughput/tokens_per_s", "{:>7,.0f} tok/s".format),
    ("", "time/step", "{:.2f} s".format),
)
"""Label, metric and format of the line of a step; a metric that is absent is left out."""
TABLE_ROWS: tuple[tuple[str, str, Format], ...] = (
    ("mean reward", "reward/mean", "{:.3f}".format),
    ("loss", "actor/loss", "{:.4g}".format),
    ("KL to the reference", "actor/kl_loss", "{:.4g}".format),
    ("entropy", "actor/entropy", "{:.4g}".format),
    ("response length", "rollout/response_length/mean", "{:.1f}".format),
    ("seconds a step", "time/step", "{:.3f}".format),
    ("  of these, engine", "time/engine", "{:.3f}".format),
    ("tokens a second", "throughput/tokens_per_s", "{:,.0f}".format),
)


STYLES: dict[Level, str] = {"info": "", "warning": "yellow", "error": "bold red", "traceback": "dim"}
TRACEBACK_LINES = 6


class ConsoleRecorder(Recorder):
    """Shows a run on `stream`, or on standard output."""

    def __init__(self, name: str, folder: Path, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream, highlight=False, markup=False, emoji=False)
        self._name, self._folder = name, folder
        self._started = self._ready = self._last = time.monotonic()
        self._first: list[Mapping[str, float]] = []
        self._recent: deque[Mapping[str, float]] = deque(maxlen=NUM_ENDS)
        self._seconds: deque[float] = deque(maxlen=10)
        self._between = 0.0
        self._num_done = 0
        self._num_unscored = 0.0
        self._validations = Validations()
        self._failed: Counter[str] = Counter()
        self._notes: Counter[str] = Counter()
        self._progress = Progress(
            SpinnerColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._progress.start()

    def event(self, event: Event) -> None:
        """Count the rows that failed; `log.txt` names them."""
        for failure in event.failures:
            self._failed[event.node] += max(1, len(failure.rows))

    def stage(self, text: str) -> None:
        """What the run is waiting for before its first step."""
        self._progress.update(self._task, description=text)
        if not self._console.is_terminal:
            self._print(f"{text} ...")

    def step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """The lines of a step and of its validation; the first steps and the last ones are kept for the table."""
        number = f"step {step:>{len(str(num_steps))}}/{num_steps}"
        if step:
            self._step(number, step, num_steps, metrics)
        self._validations.add(metrics)
        for line in lines_of(metrics):
            self._print(f"{number}  {line}")

    def _step(self, number: str, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        now = time.monotonic()
        self._seconds.append(metrics.get("time/step", now - self._last))
        if not self._recent:
            self._ready = now - self._seconds[0]
        else:  # validation, checkpoints
            self._between += max(0.0, now - self._last - self._seconds[-1])
        self._last = now
        self._num_done += 1
        if len(self._first) < NUM_ENDS:
            self._first.append(metrics)
        self._recent.append(metrics)
        unscored = metrics.get("reward/unscored", 0.0)
        self._num_unscored += unscored if math.isfinite(unscored) else 0.0
        parts = [number] + [label + form(metrics[name]) for label, name, form in STEP_PARTS if name in metrics]
        eta = f"eta {_clock((num_steps - step) * (_mean(self._seconds) + self._between / self._num_done))}"
        self._print("  ".join([*parts, eta]))
        self._progress.update(
            self._task, completed=step, total=num_steps, description=f"step {step}/{num_steps}  {eta}  elapsed"
        )

    def note(self, text: str, level: Level = "info") -> None:
        """Shown at once; the same text again is only counted, and the count shown at the end."""
        if level == "traceback":  # its end says where; the rest is in log.txt
            text = "\n".join(text.rstrip().splitlines()[-TRACEBACK_LINES:])
        shown = text if level in ("info", "traceback") or text.startswith(level) else f"{level}: {text}"
        self._notes[shown] += 1
        if self._notes[shown] == 1:
            self._print(shown, STYLES[level])

    def close(self, status: Status, errors: Sequence[str] = ()) -> None:
        """The final table, what went wrong how often, and where everything lies; errors are for the caller to show."""
        self._progress.stop()
        if self._recent:
            self._console.print(self._table())
        for text, num_times in self._notes.items():
            if num_times > 1:
                self._print(f"{num_times} times: {text}")
        if self._failed:
            by_node = ", ".join(f"{node} {num}" for node, num in self._failed.most_common())
            self._print(f"rows failed: {self._failed.total()} ({by_node}); log.txt names each", "yellow")
        if self._num_unscored:
            self._print(f"rows unscored: {self._num_unscored:.0f}", "yellow")
        if self._num_done:
            steps, startup = _clock(self._last - self._ready), _clock(self._ready - self._started)
            done = f"{self._num_done} step{'s' * (self._num_done != 1)} in {steps} after {startup} of start-up"
        else:
            done = f"no step finished in {_clock(time.monotonic() - self._started)}"
        self._print(f"{self._name} {status}: {done}", "bold")
        self._print(f"run folder: {self._folder}")

    def _table(self) -> Table:
        num = len(self._first)
        table = Table(box=box.ASCII2 if self._console.options.ascii_only else box.SIMPLE_HEAD)
        table.add_column("")
        table.add_column(f"first {num} steps", justify="right")
        table.add_column(f"last {num} steps", justify="right")
        for label, name, form in TABLE_ROWS:
            ends = [[metrics[name] for metrics in end if name in metrics] for end in (self._first, self._recent)]
            if all(ends):
                table.add_row(label, *(form(_mean(values)) for values in ends), style="bold" * (name == "reward/mean"))
        validations = self._validations.rows()
        if validations:
            table.add_row("", "first validation", "last validation", style="dim")
        for label, first, last in validations:
            table.add_row(label, first, last)
        return table

    def _print(self, text: str, style: str = "") -> None:
        # Texts of users and models may hold control characters, and characters that the terminal's encoding lacks.
        clean = "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
        encoding = self._console.encoding
        self._console.print(clean.encode(encoding, "replace").decode(encoding), style=style, soft_wrap=True)


def _mean(values: Iterable[float]) -> float:
    """Mean of the finite values; NaN without one."""
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))) if math.isfinite(seconds) else "-"
