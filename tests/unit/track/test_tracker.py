"""What all trackers have in common: whatever a service does, training goes on, and nothing that was sent is lost."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.schedule.record import Level, Samples, Status
from flowrl.track import tracker
from flowrl.track.names import escaped, unescaped
from flowrl.track.tensorboard import REFUSED as BY_TENSORBOARD
from flowrl.track.tracker import Complain, Ending, Point, RunIds, Service, Tracker
from flowrl.track.wandb import REFUSED as BY_WANDB

TABLE = Samples(1, {"reward": [1.0]}, {"reward": "float"})


class Kept(Service):
    """A service that keeps what it is sent, and fails or hangs where told to."""

    shown = "the shelf"

    def __init__(self, before: Callable[[str], None] = lambda call: None, local: bool = False) -> None:
        self.before, self.local = before, local
        self.ids: list[str] = []
        self.points: list[Point] = []
        self.tables: list[Samples] = []
        self.ended: list[Status] = []

    def connect(self, run_id: str, complain: Complain) -> str:
        self.before("connect")
        self.ids.append(run_id)
        return run_id or "new"

    def send(self, points: Sequence[Point]) -> None:
        self.before("send")
        self.points += points

    def show(self, samples: Samples) -> None:
        self.before("show")
        self.tables.append(samples)

    def end(self, status: Status) -> None:
        self.before("end")
        self.ended.append(status)


class Noted:
    """The notes of trackers."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __call__(self, text: str, level: Level) -> None:
        self.texts.append(text)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "SEND_SECONDS", 0.01)
    monkeypatch.setattr(tracker, "RETRY_SECONDS", 0.02)


def start(service: Service, folder: Path, resumed: bool = False, note: Noted | None = None) -> Tracker:
    return Tracker(service, RunIds(folder, resumed), Ending(), note or Noted())


def failing(num_times: int, where: str) -> Callable[[str], None]:
    """Raises the first few times."""
    left = [num_times]

    def before(call: str) -> None:
        if call == where and left[0]:
            left[0] -= 1
            raise OSError("not now: http://me:secret@host/x")

    return before


def test_everything_arrives_in_order_and_nan_leaves_a_gap(tmp_path: Path) -> None:
    service = Kept()
    recorder = start(service, tmp_path)
    for step in range(1, 50):
        recorder.step(step, 49, {"a": step, "b": math.nan, "c": -math.inf})
    recorder.samples(TABLE)
    recorder.close("failed")
    assert [(point.name, point.value, point.step) for point in service.points] == [("a", s, s) for s in range(1, 50)]
    assert service.tables == [TABLE]
    assert service.ended == ["failed"]


@pytest.mark.parametrize("where", ["connect", "send"])
def test_what_fails_is_tried_again_and_noted_once_without_its_password(where: str, tmp_path: Path) -> None:
    service, note = Kept(failing(3, where)), Noted()
    recorder = start(service, tmp_path, note=note)
    recorder.step(1, 2, {"a": 1.0})
    deadline = time.monotonic() + 5
    while not service.points and time.monotonic() < deadline:
        time.sleep(0.01)
    recorder.step(2, 2, {"a": 2.0})
    recorder.close("finished")
    assert [point.value for point in service.points] == [1.0, 2.0]
    (text,) = note.texts
    assert text.startswith("the shelf failed; training goes on, and it is tried again: OSError: not now")
    assert "secret" not in text


def test_a_table_that_is_refused_holds_up_no_metrics(tmp_path: Path) -> None:
    service, note = Kept(failing(1, "show")), Noted()
    recorder = start(service, tmp_path, note=note)
    recorder.samples(TABLE)
    recorder.step(1, 1, {"a": 1.0})
    recorder.samples(TABLE)
    recorder.close("finished")
    assert len(service.tables) == 1
    assert service.ended == ["finished"]
    assert len(note.texts) == 1


def test_services_that_hang_are_waited_for_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracker.CLOSE_SECONDS, "finished", 0.4)
    release, ending, note = threading.Event(), Ending(), Noted()
    ids = RunIds(tmp_path, resumed=False)
    trackers = [Tracker(Kept(lambda call: release.wait(20) and None), ids, ending, note) for _ in range(3)]
    for recorder in trackers:
        start = time.monotonic()
        recorder.step(1, 1, {"a": 1.0})
        assert time.monotonic() - start < 0.2
    start = time.monotonic()
    for recorder in trackers:
        recorder.close("finished")
    assert time.monotonic() - start < 0.9
    assert len(note.texts) == 3
    release.set()


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker, "MAX_WAITING", 10)
    monkeypatch.setattr(tracker, "MAX_TABLES", 2)
    service = Kept(failing(10**9, "connect"))
    recorder = start(service, tmp_path)
    for step in range(100):
        recorder.step(step, 100, {"a": 1.0})
        recorder.samples(TABLE)
    assert len(recorder._waiting) == 10
    assert len(recorder._tables) == 2
    recorder.close("interrupted")


def test_a_resumed_run_goes_on_with_its_id_and_a_new_one_does_not(tmp_path: Path) -> None:
    for resumed, expected in ((False, ""), (True, "new"), (False, "")):
        service = Kept()
        start(service, tmp_path, resumed).close("finished")
        assert service.ids == [expected]
    assert json.loads((tmp_path / "trackers.json").read_text()) == {"the shelf": "new"}


@given(st.text(max_size=12) | st.text(alphabet="_step:@/. \ud800\n", max_size=8))
def test_names_are_mapped_reversibly_and_never_clash(name: str) -> None:
    for refused in (BY_TENSORBOARD, BY_WANDB):
        mapped = escaped(name, refused)
        assert unescaped(mapped) == name
        mapped.encode()
        assert mapped
    assert not escaped(name, BY_WANDB).startswith("_")
    assert escaped(name, BY_WANDB) != "step"


def test_names_of_our_own_metrics_stay_as_they_are() -> None:
    for name in ("reward/mean", "val/gsm8k/mean@4", "rollout/response_length/max", "time/step", "step/time"):
        assert escaped(name, BY_TENSORBOARD) == escaped(name, BY_WANDB) == name
