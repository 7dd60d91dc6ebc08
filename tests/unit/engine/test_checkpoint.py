"""Checkpoints on disk: complete or none, whatever a save was doing when it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.engine import checkpoint
from flowrl.engine.checkpoint import Checkpoint, Incomplete, complete, drop_after, latest, partial_folder, prune, read

PHASES = ("check_files", "bring_to_disk", "put_in_place", "mark", "write_text")


class Killed(BaseException):
    """The process ended here."""


def save(run: Path, step: int) -> Checkpoint:
    partial = partial_folder(run, step)
    (partial / "nodes").mkdir()
    (partial / "nodes" / "weights").write_bytes(b"x" * step)
    marker = {"run": run.name, "step": step, "versions": {"policy": step}, "data": {"state": {}}}
    return complete(partial, marker, {"nodes/weights": step})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_newest_checkpoint_says_what_it_holds(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    found, faults = latest(tmp_path)
    assert found is not None
    assert (found.step, found.versions, faults) == (10, {"policy": 10}, ())
    assert latest(tmp_path / "none") == (None, ())


@pytest.mark.parametrize("phase", PHASES)
def test_a_save_that_ends_in_any_phase_leaves_the_one_before(
    phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 2)

    def die(*_: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, phase, die)
        with pytest.raises(Killed):
            save(tmp_path, 3)
    found, (fault,) = latest(tmp_path)
    assert found is not None and found.step == 2
    assert "its writing was broken off" in fault
    assert save(tmp_path, 3).step == 3
    prune(tmp_path, 5)
    assert names(tmp_path) == ["step_2", "step_3"]


def lose(folder: Path) -> None:
    (folder / "nodes" / "weights").unlink()


def empty(folder: Path) -> None:
    (folder / "nodes" / "weights").write_bytes(b"")


def garble(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("{")


def no_mapping(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("[]")


def empty_marker(folder: Path) -> None:
    (folder / "checkpoint.json").write_text("")


def no_marker(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


def newer_format(folder: Path) -> None:
    marker = json.loads((folder / "checkpoint.json").read_text())
    (folder / "checkpoint.json").write_text(json.dumps({**marker, "format": 99}))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lose, "it lacks nodes/weights"),
        (empty, "nodes/weights has 0 of 3 bytes"),
        (garble, "cannot be read"),
        (no_mapping, "cannot be read"),
        (empty_marker, "cannot be read"),
        (no_marker, "it has no checkpoint.json"),
        (newer_format, "it has format 99"),
    ],
)
def test_a_damaged_checkpoint_is_left_out_and_the_reason_told(
    damage: Callable[[Path], None], why: str, tmp_path: Path
) -> None:
    save(tmp_path, 2)
    damage(save(tmp_path, 3).path)
    found, (fault,) = latest(tmp_path)
    assert found is not None and found.step == 2
    assert fault.startswith("checkpoints/step_3 is left out")
    assert why in fault
    with pytest.raises(Incomplete, match=why.replace(".", r"\.")):
        read(tmp_path / "checkpoints" / "step_3")


def test_files_that_a_worker_wrote_elsewhere_make_no_checkpoint(tmp_path: Path) -> None:
    partial = partial_folder(tmp_path, 1)
    marker = {"step": 1, "versions": {}, "data": {}}
    with pytest.raises(Incomplete, match=r"it lacks random/train-1\.pickle"):
        complete(partial, marker, {"random/train-1.pickle": 3})


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_as_many_as_asked_for_are_kept_and_damaged_ones_do_not_count(keep: int, tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, step)
    lose(tmp_path / "checkpoints" / "step_5")
    partial_folder(tmp_path, 7)
    prune(tmp_path, keep)
    assert names(tmp_path) == [f"step_{step}" for step in (1, 2, 3, 4, 6)[-keep:]]


def test_a_checkpoint_that_is_half_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(checkpoint.shutil, "rmtree", die)
    with pytest.raises(Killed):
        prune(tmp_path, 1)
    assert not checkpoint.is_complete(tmp_path / "checkpoints" / "step_1")
    assert checkpoint.is_complete(tmp_path / "checkpoints" / "step_2")


def test_later_checkpoints_go_when_a_run_goes_on_from_an_earlier_one(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step)
    drop_after(tmp_path, 4)
    assert names(tmp_path) == ["step_2", "step_4"]
