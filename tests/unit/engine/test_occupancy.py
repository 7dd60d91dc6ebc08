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


def test_what_a_worker_does_at_once_counts_once(clock: Clock) -> None:
    found = Occupancy({"train": ["train/0", "train/1"], "cpu": ["cpu/0"]})
    clock.now += 4
    for worker, start, end in (("train/0", 100, 102), ("train/0", 101, 103), ("train/1", 102, 103)):
        found.add(worker, start, end)
    assert found.idle() == {"idle/train": pytest.approx(1 - (3 + 1) / (2 * 4)), "idle/cpu": 1.0}


def test_a_call_that_goes_on_counts_in_every_step_for_its_part(clock: Clock) -> None:
    found = Occupancy({"generate": ["generate/0"]})
    with ExitStack() as calls:
        clock.now += 1
        calls.enter_context(found.running("rollout", ["generate/0"]))
        clock.now += 3
        assert found.idle() == {"idle/generate": 0.25}
        found.begin()
        clock.now += 2
        assert found.idle() == {"idle/generate": 0.0}
    found.add("generate/0", 101, 106)
    clock.now += 2
    assert found.idle() == {"idle/generate": 0.5}


def test_a_call_has_ended_when_its_last_block_is_there_whatever_it_still_waits_for(clock: Clock) -> None:
    found = Occupancy({"cpu": ["cpu/0"]})
    with found.running("reward", ["cpu/0"]) as ended:
        assert found.unended == [("reward", 100.0)]
        ended()
        clock.now += 1
        assert not found.unended
        assert found.idle() == {"idle/cpu": 1.0}


def test_nothing_divides_by_zero(clock: Clock) -> None:
    assert Occupancy({"cpu": ["cpu/0"]}).idle() == {"idle/cpu": 1.0}
