"""Which steps are saved: every so many, the last one once, none that changed nothing."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from flowrl.engine.local import LocalCluster
from flowrl.engine.saver import Saver
from flowrl.spec.document import CheckpointSpec
from flowrl.track import Recorders


def saved(every: int, changes: list[bool]) -> list[int]:
    """The steps of a run that are saved, from whether each changed the weights."""
    spec = CheckpointSpec(every=every)
    saver = Saver(Path(), spec, len(changes), LocalCluster(), [], Recorders(), {})
    found = []
    for step, changed in enumerate(changes, 1):
        if saver.is_due(step, changed):
            found.append(step)
    return found


def test_the_last_step_is_saved_once_on_the_interval_and_off_it() -> None:
    assert saved(2, [True] * 5) == [2, 4, 5]
    assert saved(2, [True] * 4) == [2, 4]
    assert saved(50, [True] * 3) == [3]
    assert saved(1, [True] * 3) == [1, 2, 3]


def test_a_skipped_step_is_not_saved_and_the_next_one_is_in_its_place() -> None:
    assert saved(2, [True, False, True, True, True]) == [3, 4, 5]
    assert saved(2, [False, False, False]) == []
    assert saved(2, [True, True, False]) == [2]


def test_what_a_skipped_last_step_leaves_unsaved_is_saved_at_the_end() -> None:
    assert saved(2, [True, True, True, False]) == [2, 4]
    assert saved(10, [True, True, False]) == [3]


@given(st.integers(1, 5), st.lists(st.booleans(), min_size=1, max_size=20))
def test_nothing_that_changed_is_lost_at_the_end_and_no_more_than_an_interval_before(
    every: int, changes: list[bool]
) -> None:
    steps = saved(every, changes)
    assert steps == sorted(set(steps))
    changed = [step for step, one in enumerate(changes, 1) if one]
    if changed:
        assert steps[-1] >= changed[-1]
    for step in steps[:-1]:
        assert changes[step - 1]
    for multiple in range(every, len(changes), every):
        later = [step for step in changed if step >= multiple]
        assert not later or any(multiple <= step <= later[0] for step in steps)
