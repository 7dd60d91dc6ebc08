"""What a person reads, into a pipe and on a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from flowrl.metrics import Failure
from flowrl.schedule.record import Event
from flowrl.track.console import ConsoleRecorder

FOLDER = Path("runs/grpo_sync-1")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the person who runs the tests may colour the output."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def metrics_of(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 20,
        "actor/loss": -0.001 * step,
        "actor/kl_loss": 1e-4,
        "throughput/tokens_per_s": 2345.6,
        "time/step": 2.0,
        "rollout/response_length/mean": 4.25,
        "reward/unscored": 1.0,
        "unknown": 3.0,
    }


def run_into(stream: io.TextIOBase, num_steps: int = 12) -> None:
    recorder = ConsoleRecorder("grpo_sync", FOLDER, stream)  # type: ignore[arg-type]
    recorder.stage("starting Ray")
    for step in range(1, num_steps + 1):
        failures = (Failure(("u1_0_0", "u2_0_0"), "ValueError: x"),) * (step == 2)
        recorder.event(Event(step, "reward", 1, "cpu/0", 0, (), 0.0, 0.0, 0, 0, (), (), failures))
        recorder.step(step, num_steps, metrics_of(step))
        recorder.note("short batch: 31 of 32 groups", "warning")
    recorder.note("reply \x1b[31m[bold]ö\ud800[/bold]")
    recorder.close("finished", [])


def test_a_pipe_gets_one_plain_line_a_step_and_the_table() -> None:
    stream = io.StringIO()
    run_into(stream)
    text = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text)
    steps = [line for line in text.splitlines() if line.startswith("step ")]
    assert len(steps) == 12
    assert " ".join(steps[2].split()) == "step 3/12 reward 0.150 loss -0.003 2,346 tok/s 2.00 s eta 0:00:18"
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "starting Ray ..." in text
    rows = [line.split() for line in text.splitlines()]
    assert ["mean", "reward", "0.150", "0.500"] in rows
    assert ["response", "length", "4.2", "4.2"] in rows
    assert "entropy" not in text, "an absent metric is left out"


def test_the_time_left_counts_what_lies_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 2 s, and a validation of 8 s after every second one: 6 s a step, of which time/step knows 2."""
    clock, stream = iter([0.0, 5.0, 15.0, 17.0, 27.0]), io.StringIO()
    recorder = ConsoleRecorder("val", FOLDER, stream)
    monkeypatch.setattr("flowrl.track.console.time.monotonic", lambda: next(clock))
    recorder._started = recorder._ready = recorder._last = next(clock)
    for step in range(1, 5):
        recorder.step(step, 104, metrics_of(step))
    (last,) = [line for line in stream.getvalue().splitlines() if line.startswith("step   4/104")]
    assert last.endswith("eta 0:10:00")  # 16 s between the steps of 4: 100 x (2 + 4)


def test_the_same_warning_is_shown_once_and_counted_at_the_end() -> None:
    stream = io.StringIO()
    run_into(stream)
    shown = [line for line in stream.getvalue().splitlines() if "short batch" in line]
    assert shown == ["warning: short batch: 31 of 32 groups", "12 times: warning: short batch: 31 of 32 groups"]


def test_the_end_names_failures_unscored_rows_time_and_folder() -> None:
    stream = io.StringIO()
    run_into(stream)
    text = stream.getvalue()
    assert "rows failed: 2 (reward 2); log.txt names each" in text
    assert "rows unscored: 12" in text
    assert "grpo_sync finished: 12 steps in " in text
    assert f"run folder: {FOLDER}" in text


def test_markup_in_a_note_is_text_and_an_old_encoding_is_no_error() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    run_into(stream)
    stream.flush()
    assert b"reply ?[31m[bold]??[/bold]" in raw.getvalue()
    assert b"mean reward" in raw.getvalue()


def test_a_run_that_fails_before_its_first_step_ends_with_its_status() -> None:
    stream = io.StringIO()
    recorder = ConsoleRecorder("grpo_sync", FOLDER, stream)
    recorder.close("failed", ["node reward: boom"])
    text = stream.getvalue()
    assert "boom" not in text
    assert "grpo_sync failed: no step finished in 0:00:00" in text
    assert "mean reward" not in text


def test_a_run_shorter_than_five_steps_and_values_that_are_not_finite_are_shown() -> None:
    stream = io.StringIO()
    recorder = ConsoleRecorder("x", FOLDER, stream)
    recorder.step(1, 2, {"reward/mean": float("nan"), "time/step": float("nan"), "reward/unscored": float("nan")})
    recorder.step(2, 2, {"reward/mean": 0.25})
    recorder.close("interrupted")
    text = stream.getvalue()
    assert "first 2 steps" in text
    assert "eta -" in text
    assert "x interrupted: 2 steps" in text
    assert "reward nan" in text
    assert "0.250" in text


def test_a_terminal_keeps_the_line_of_every_step_above_a_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    run_into(stream)
    text = stream.getvalue()
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is shown again"
    assert all(f"step {step:>2}/12  reward" in text for step in range(1, 13))
    assert "mean reward" in text


def test_a_validation_has_a_line_of_its_own_and_its_ends_are_in_the_table() -> None:
    stream = io.StringIO()
    recorder = ConsoleRecorder("grpo_sync", FOLDER, stream)
    for step in range(13):
        measured = {"val/a/b/mean@4": step / 20, "val/a/b/pass@1": 0.1, "val/a/b/pass@4": 0.8, "val/a/b/maj@4": 0.5}
        counts = {"val/a/b/rows": 256.0, "val/a/b/unscored": float(step == 0)}
        recorder.step(step, 12, (metrics_of(step) if step else {}) | (measured | counts if step % 6 == 0 else {}))
    recorder.close("finished", [])
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step  0/12  val/a/b  mean@4 0.000  pass@4 0.800  maj@4 0.500  256 rows  1 unscored"
    assert lines[7] == "step  6/12  val/a/b  mean@4 0.300  pass@4 0.800  maj@4 0.500  256 rows"
    assert next(line for line in lines if "val/a/b/mean@4" in line).split() == ["val/a/b/mean@4", "0.000", "0.600"]
    assert "12 steps in" in lines[-2]


def test_what_was_validated_once_stands_at_the_end_alone() -> None:
    stream = io.StringIO()
    recorder = ConsoleRecorder("grpo_sync", FOLDER, stream)
    recorder.step(1, 1, {**metrics_of(1), "val/a/mean@1": 0.25})
    recorder.close("finished", [])
    (row,) = [line for line in stream.getvalue().splitlines() if "val/a/mean@1" in line]
    assert row.split() == ["val/a/mean@1", "0.250"]
