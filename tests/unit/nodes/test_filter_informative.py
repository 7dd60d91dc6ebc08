"""`filter.informative`: which groups say what was better."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.batch import Sample, Token
from flowrl.metrics import collect
from flowrl.nodes.advantage.grpo import Grpo
from flowrl.nodes.filter.informative import Informative
from flowrl.rows import Rows

NAN = float("nan")


def kept(groups: dict[str, list[float]], **settings: float) -> tuple[dict[str, bool], dict[str, float]]:
    """Which groups of these rewards are kept, and the metrics by the last part of their names."""
    rows = Rows.of([uid for uid, rewards in groups.items() for _ in rewards])
    reward = Sample[float](rows, [one for rewards in groups.values() for one in rewards]).cast("float")
    with collect() as report:
        keep = Informative(**settings).run(reward).keep  # type: ignore[arg-type]
    metrics = {name.removeprefix("groups/"): part.value for name, part in report.metrics.items()}
    return dict(zip(rows.uids, keep.values.tolist(), strict=True)), metrics


def test_groups_with_equal_rewards_are_left_out_and_counted_by_kind() -> None:
    groups = {"a": [1.0, 0.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 0.0, 0.0], "d": [0.5, 0.5]}
    found, metrics = kept(groups)
    assert found == {"a": True, "b": False, "c": False, "d": False}
    assert metrics == {"kept": 1, "all_right": 1, "all_wrong": 2, "too_few_scored": 0, "reward/tried": 0.5}
    assert kept(groups, threshold=0.0)[1]["all_right"] == 2


def test_rewards_are_compared_and_not_a_rounded_deviation() -> None:
    assert kept({"a": [0.7] * 8, "b": [0.7] * 7 + [np.nextafter(np.float32(0.7), 1)]})[0] == {"a": False, "b": True}


def test_what_was_not_scored_says_nothing() -> None:
    found, metrics = kept({"a": [1.0, NAN, 0.0], "b": [1.0, NAN], "c": [NAN, NAN], "d": [1.0, NAN, 1.0], "e": [0.0]})
    assert found == {"a": True, "b": False, "c": False, "d": False, "e": False}
    assert metrics == {"kept": 1, "all_right": 1, "all_wrong": 0, "too_few_scored": 3, "reward/tried": 2 / 3}


def test_a_session_of_several_outputs_counts_by_its_last() -> None:
    rows = Rows(["a"], [0] * 4, [0, 0, 1, 1], [0, 1, 0, 1])
    keep = Informative().run(Sample(rows, [0.0, 1.0, 0.5, 1.0])).keep
    assert keep.values.tolist() == [False]


@pytest.mark.parametrize("seed", range(5))
def test_the_groups_kept_are_those_that_have_advantages(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = Rows.of([f"u{number}" for number in random.integers(0, 8, 24)])
    reward = Sample(rows, random.choice([0.0, 0.7, NAN], len(rows)).astype(np.float32))
    mask = Token.of(rows, [[True]] * len(rows), "bool")
    advantages = Grpo().run(reward, mask).advantages.values
    signal = [bool(np.abs(advantages[rows.group == group]).any()) for group in range(rows.num_groups)]
    assert Informative().run(reward).keep.values.tolist() == signal
