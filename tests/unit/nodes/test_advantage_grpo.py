"""`advantage.grpo` against worked values."""

from typing import Any

import numpy as np
import pytest

from flowrl.batch import Sample, Token
from flowrl.metrics import collect
from flowrl.nodes.advantage.grpo import Grpo
from flowrl.rows import Rows


def advantages(rewards: Any, uids: Any, lengths: Any = None, **settings: Any) -> list[list[float]]:
    rows = uids if isinstance(uids, Rows) else Rows.of(uids)
    mask = Token[bool].of(rows, [[True] * length for length in (lengths or [1] * len(rows))])
    out = Grpo(**settings).run(Sample(rows, rewards), mask)
    return [row.tolist() for row in out.advantages.jagged]


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1, 0, 0], [1.1547, -0.5774, -0.5774]), ([0, 1, 1], [-1.1547, 0.5774, 0.5774])]
)
def test_worked_groups(rewards: list[float], expected: list[float]) -> None:
    assert np.allclose(np.ravel(advantages(rewards, "aaa")), expected, atol=1e-4)


def test_groups_are_found_by_uid_in_any_order_of_rows() -> None:
    rewards = {"a": [1.0, 0.0, 0.0, 0.0], "b": [5.0, 5.0, 5.0], "c": [0.0, 1.0, 2.0, 3.0]}
    uids = list("abcacbcabca")
    seen = {uid: iter(values) for uid, values in rewards.items()}
    found = np.ravel(advantages([next(seen[uid]) for uid in uids], uids))
    for uid, values in rewards.items():
        own = found[[position for position, name in enumerate(uids) if name == uid]]
        std = np.std(values, ddof=1)
        expected = np.zeros(3) if uid == "b" else (values - np.mean(values)) / (std + 1e-6)
        assert np.allclose(own, expected)


def test_equal_rewards_that_float32_cannot_hold_give_exactly_zero() -> None:
    found = advantages(np.full(8, 0.7, dtype=np.float32), "a" * 8)
    assert np.ravel(found).tolist() == [0.0] * 8


def test_a_group_of_one_gives_exactly_zero_and_is_counted() -> None:
    with collect() as report:
        assert advantages([5.0, 1.0, 0.0], "abb")[0] == [0.0]
    assert report.metrics["groups/single"].value == 1
    assert report.metrics["groups/no_signal"].value == 1


def test_an_unscored_row_leaves_its_siblings_alone_and_is_out_of_the_loss() -> None:
    rows = Rows.of("aaaa")
    mask = Token[bool].of(rows, [[True, False], [True, True], [True], [True]])
    with collect() as report:
        out = Grpo().run(Sample[float](rows, [1.0, None, 0.0, 1.0]), mask)  # type: ignore[list-item]
    alone = np.ravel(advantages([1.0, 0.0, 1.0], "aaa"))
    assert out.advantages.values.tolist() == [alone[0], 0.0, 0.0, 0.0, alone[1], alone[2]]
    assert out.loss_mask.values.tolist() == [True, False, False, False, True, True]
    assert report.metrics["reward/unscored"].value == 1
    assert report.metrics["reward/mean"].value == pytest.approx(2 / 3)


def test_the_last_output_of_a_session_is_its_reward_and_counts_once() -> None:
    rows = Rows(["a"], [0, 0, 0, 0], [0, 1, 0, 2], [1, 0, 0, 0])
    found = np.ravel(advantages([1.0, 0.0, 9.0, 0.0], rows))
    assert np.allclose(found, [1.1547, -0.5774, 1.1547, -0.5774], atol=1e-4)


def test_without_normalisation_it_is_the_distance_from_the_mean() -> None:
    assert np.allclose(np.ravel(advantages([1, 0, 0], "aaa", normalize="none")), [2 / 3, -1 / 3, -1 / 3])
