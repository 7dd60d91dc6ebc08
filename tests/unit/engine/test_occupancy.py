"""The time in which workers have nothing to do."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from flowrl.engine import occupancy
from flowrl.engine.occupancy import Occupancy


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(occupancy, "now", clock)
    return clock


def test_calls_of_a_worker_that_overlap_count_once(clock: Clock) -> None:
    found = Occupancy({"train": ["train/0", "train/1"], "cpu": ["cpu/0"]})
    with found.busy(["train/0"]):
        clock.now += 2
        with found.busy(["train/0", "train/1"]):
            clock.now += 1
    clock.now += 1
    assert found.idle() == {"idle/train": pytest.approx(1 - (3 + 1) / (2 * 4)), "idle/cpu": 1.0}


def test_a_call_that_goes_on_counts_in_every_step_for_its_part(clock: Clock) -> None:
    found = Occupancy({"generate": ["generate/0"]})
    with ExitStack() as calls:
        clock.now += 1
        calls.enter_context(found.busy(["generate/0"]))
        clock.now += 3
        assert found.idle() == {"idle/generate": 0.25}
        found.begin()
        clock.now += 2
        assert found.idle() == {"idle/generate": 0.0}
    clock.now += 2
    assert found.idle() == {"idle/generate": 0.5}


def test_a_step_without_any_duration_is_not_idle(clock: Clock) -> None:
    assert Occupancy({"cpu": ["cpu/0"]}).idle() == {"idle/cpu": 0.0}
