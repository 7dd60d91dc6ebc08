"""Group-relative advantages for any rewards, group sizes and order of rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flowrl.batch import Sample, Token
from flowrl.nodes.advantage.grpo import Grpo
from flowrl.rows import Rows

REWARDS = st.none() | st.sampled_from([0.0, 1.0, 0.1, 0.7]) | st.floats(-1e6, 1e6, width=32)
ROWS = st.lists(st.tuples(st.sampled_from("abcd"), REWARDS, st.integers(0, 3)), min_size=1, max_size=40)


def plain(rewards: list[float | None]) -> list[float]:
    """One group, written as in the paper."""
    scored = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if len(scored) < 2 or scored.max() == scored.min():
        return [0.0] * len(rewards)
    mean, std = scored.mean(), scored.std(ddof=1)
    return [0.0 if reward is None else (reward - mean) / (std + 1e-6) for reward in rewards]


@given(ROWS)
def test_rows_get_what_their_group_alone_would_give_them(drawn: list[tuple[str, float | None, int]]) -> None:
    rows = Rows.of([uid for uid, _, _ in drawn])
    mask = Token[bool].of(rows, [[True] * length for _, _, length in drawn], "bool")
    out = Grpo().run(Sample[float](rows, [reward for _, reward, _ in drawn]), mask)  # type: ignore[misc]
    groups: dict[str, list[float]] = {
        name: plain([reward for uid, reward, _ in drawn if uid == name]) for name in rows.uids
    }
    seen = {name: iter(values) for name, values in groups.items()}
    for (uid, reward, length), found, trained in zip(drawn, out.advantages.jagged, out.loss_mask.jagged, strict=True):
        assert np.allclose(found, [next(seen[uid])] * length, rtol=1e-6, atol=1e-6)
        assert trained.tolist() == [reward is not None] * length


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(drawn: list[tuple[str, float | None, int]], random: object) -> None:
    rows = Rows.of([uid for uid, _, _ in drawn])
    order = np.array(sorted(range(len(rows)), key=lambda _: random.random()))  # type: ignore[attr-defined]
    shuffled = rows.take(order)
    reward = Sample[float](rows, [reward for _, reward, _ in drawn])  # type: ignore[misc]
    first = Grpo().run(reward, Token(rows, np.ones(len(rows), bool), np.arange(len(rows) + 1)))
    second = Grpo().run(
        Sample(shuffled, reward.values[order]), Token(shuffled, np.ones(len(rows), bool), np.arange(len(rows) + 1))
    )
    assert np.allclose(first.advantages.values[order], second.advantages.values, rtol=1e-9, atol=1e-9)
