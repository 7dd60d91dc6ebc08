"""The rewards of the library."""

import numpy as np

from flowrl.batch import Prompt, Sample, Token
from flowrl.nodes.reward.exact_match import ExactMatch
from flowrl.nodes.reward.length_penalty import LengthPenalty
from flowrl.nodes.reward.weighted_sum import WeightedSum
from flowrl.rows import Rows


def test_exact_match_compares_with_the_answer_of_the_own_group() -> None:
    rows = Rows.of("abab")
    out = ExactMatch().run(Sample(rows, ["1", "2", " 1\n", "1"]), Prompt(Rows("ba", planned=[2, 2]), ["2", "1"]))
    assert list(out.reward) == [1.0, 1.0, 1.0, 0.0]


def test_exact_match_takes_space_and_case_as_told() -> None:
    rows = Rows.of("aa")
    response, answer = Sample(rows, ["Yes", " yes"]), Prompt(rows, ["yes"])
    assert list(ExactMatch(strip=False, ignore_case=True).run(response, answer).reward) == [1.0, 0.0]
    assert list(ExactMatch().run(response, answer).reward) == [0.0, 1.0]


def test_length_penalty_counts_the_models_tokens_only() -> None:
    rows = Rows.of("aab")
    mask = Token[bool].of(rows, [[True, False, True], [True], [True] * 4])
    out = LengthPenalty(budget=4, scale=0.4).run(Sample[float](rows, [1.0, None, 0.0]), mask)  # type: ignore[list-item]
    assert np.allclose(out.shaped_reward.values, [0.8, np.nan, -0.4], equal_nan=True)


def test_weighted_sum_with_an_unscored_part_is_unscored() -> None:
    rows = Rows.of("aab")
    first, second = Sample(rows, [1.0, 2.0, np.nan]), Sample(rows, [1.0, np.nan, 0.0])
    out = WeightedSum(coefficients=[1.0, 0.5]).run([first, second])
    assert np.allclose(out.reward.values, [1.5, np.nan, np.nan], equal_nan=True)
    assert WeightedSum().run([first, first]).reward.values[0] == 2.0


def test_weighted_sum_wants_one_coefficient_for_each_reward() -> None:
    assert "2 coefficients for 1 rewards" in WeightedSum(coefficients=[1.0, 0.5]).refuses({"rewards": ("maths",)}, 8)
    assert "for 0 rewards" in WeightedSum().refuses({}, 8)
    assert not WeightedSum().refuses({"rewards": ("maths", "style")}, 8)
