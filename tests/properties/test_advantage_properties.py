"""What every node of `advantage.*` keeps, for any rewards, masks, group sizes and order of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.batch import Prompt, Sample, Token
from flowrl.column import Column
from flowrl.nodes._backend.returns import Steps
from flowrl.registry import find, library_names
from flowrl.rows import Rows

NAMES = [name for name in library_names() if name.startswith("advantage.")]
FLOATS = st.floats(-100, 100, width=32)
REWARDS = st.none() | st.sampled_from([0.0, 1.0, 0.1, 0.7]) | FLOATS
TOKENS = st.lists(st.tuples(st.booleans(), FLOATS, FLOATS), max_size=5)
"""Whether the model wrote it, and two values of it."""
ROWS = st.lists(st.tuples(st.sampled_from("abc"), REWARDS, TOKENS), min_size=1, max_size=12)
Drawn = list[tuple[str, float | None, list[tuple[bool, float, float]]]]


def columns(drawn: Drawn, rows: Rows) -> dict[str, Any]:
    """Every port that a node of this family reads."""
    mask, first, second = ([[token[i] for token in tokens] for _, _, tokens in drawn] for i in range(3))
    reward = Sample[float](rows, [reward for _, reward, _ in drawn])  # type: ignore[misc]
    halves = Sample[float](rows, [None if reward is None else abs(reward) / 2 for _, reward, _ in drawn])  # type: ignore[misc]
    return {
        "reward": reward,
        "baseline": Prompt[float](rows, [{"a": 0.5, "b": 1.0, "c": None}[uid] for uid in rows.uids]),  # type: ignore[misc]
        "rewards": [reward, halves],
        "response_mask": Token[bool].of(rows, mask, "bool"),
        "values": Token[float].of(rows, first, "float"),
        "token_rewards": Token[float].of(rows, second, "float"),
        "old_log_probs": Token[float].of(rows, first, "float"),
        "teacher_log_probs": Token[float].of(rows, second, "float"),
    }


def run(name: str, drawn: Drawn, rows: Rows) -> tuple[Column[Any], ...]:
    cls = find(name, Path()).load()
    given = columns(drawn, rows)
    node = cls()
    found: tuple[Column[Any], ...] = node.run(  # type: ignore[attr-defined]
        **{port: given[port] for port in node.active_ports() if port in given}
    )
    return found


@pytest.mark.parametrize("name", NAMES)
@given(drawn=ROWS, random=st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_nothing(name: str, drawn: Drawn, random: Any) -> None:
    rows = Rows.of([uid for uid, _, _ in drawn])
    order = list(range(len(drawn)))
    random.shuffle(order)
    straight = run(name, drawn, rows)
    shuffled = run(name, [drawn[i] for i in order], rows.take(np.array(order)))
    for one, other in zip(straight, shuffled, strict=True):
        assert isinstance(one, Token) and isinstance(other, Token)
        for position, index in enumerate(order):
            assert np.allclose(one.jagged[index], other.jagged[position], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
@given(drawn=ROWS, places=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 5)), max_size=8))
def test_tokens_that_nobody_trains_change_nothing(name: str, drawn: Drawn, places: list[tuple[int, int]]) -> None:
    longer: Drawn = [(uid, reward, list(tokens)) for uid, reward, tokens in drawn]
    for row, place in places:
        longer[row % len(drawn)][2].insert(place, (False, 99.0, 0.0))
    rows = Rows.of([uid for uid, _, _ in drawn])
    plain, padded = run(name, drawn, rows), run(name, longer, rows)
    *_, mask = plain
    *_, padded_mask = padded
    assert mask.values.sum() == padded_mask.values.sum()
    for one, other in zip(plain, padded, strict=True):
        assert np.allclose(one.values[mask.values], other.values[padded_mask.values], rtol=1e-6, atol=1e-6)
        assert not one.values[~mask.values].any()
        assert not other.values[~padded_mask.values].any()
        assert np.isfinite(one.values).all()


@pytest.mark.parametrize("name", ["grpo", "rloo", "multi_reward", "opo"])
@given(drawn=ROWS)
def test_what_a_group_gains_it_loses(name: str, drawn: Drawn) -> None:
    rows = Rows.of([uid for uid, _, _ in drawn])
    written: Drawn = [(uid, reward, [(True, 0.0, 0.0)] * max(1, len(tokens))) for uid, reward, tokens in drawn]
    found = run(f"advantage.{name}", written, rows)[0]
    assert isinstance(found, Token)
    first = np.array([row[0] for row in found.jagged])
    weight = found.lengths if name == "opo" else np.ones(len(rows))  # its baseline is a mean over tokens
    assert np.allclose(np.bincount(rows.group, weight * first), 0, atol=1e-4)


@given(st.lists(st.lists(FLOATS, max_size=40), min_size=1, max_size=8), st.floats(0, 1))
def test_doubling_is_the_recurrence(drawn: list[list[float]], discount: float) -> None:
    rows = Rows.of(["a"] * len(drawn))
    steps = Steps.of(Token[bool].of(rows, [[True] * len(row) for row in drawn], "bool"))
    expected = []
    for row in drawn:
        total, backwards = 0.0, []
        for value in reversed(row):
            total = value + discount * total
            backwards.append(total)
        expected += backwards[::-1]
    values = np.array([value for row in drawn for value in row], dtype=np.float64)
    assert np.allclose(steps.discounted(values, discount), expected, rtol=1e-9, atol=1e-9)
