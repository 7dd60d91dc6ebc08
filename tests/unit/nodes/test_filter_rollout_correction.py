"""`filter.rollout_correction` against numbers worked by hand, and against its formulas token by token."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from flowrl.batch import Token
from flowrl.metrics import collect
from flowrl.nodes.filter.rollout_correction import RolloutCorrection, effective_share
from flowrl.rows import Rows

ORACLE = json.loads((Path(__file__).parents[2] / "data" / "core_algorithms.json").read_text())["inputs"]
LOG2 = math.log(2)


def corrected(
    ratios: list[list[float]],
    mask: list[list[bool]] | None = None,
    versions: list[list[int]] | None = None,
    **settings: Any,
) -> tuple[list[list[float]], list[list[bool]], dict[str, float]]:
    """Weights and mask of rows whose tokens the trainer makes so many times likelier than the engine did; metrics."""
    rows = Rows.of([f"u{number}" for number in range(len(ratios))])
    rollout = [[-1.0] * len(row) for row in ratios]
    old = [[-1.0 + math.log(ratio) for ratio in row] for row in ratios]
    columns = {"old_log_probs": Token.of(rows, old, "float"), "rollout_log_probs": Token.of(rows, rollout, "float")}
    given = mask or [[True] * len(row) for row in ratios]
    version = None if versions is None else Token[int].of(rows, versions, "int")
    with collect() as report:
        out = RolloutCorrection(**settings).run(
            **columns, response_mask=Token.of(rows, given, "bool"), policy_version=version
        )
    weights = [[round(value, 5) for value in row.tolist()] for row in out.importance_weights.jagged]
    metrics = {name.removeprefix("correction/"): part.value for name, part in report.metrics.items()}
    return weights, [row.tolist() for row in out.corrected_mask.jagged], metrics


def test_token_weights_are_the_ratio_up_to_the_limit() -> None:
    weights, mask, metrics = corrected([[1.0, 0.5, 8.0], [1.5]])
    assert weights == [[1.0, 0.5, 2.0], [1.5]]
    assert mask == [[True] * 3, [True]]
    assert metrics["truncated"] == 0.25
    assert metrics["weight/mean"] == pytest.approx(5 / 4)
    assert metrics["weight/max"] == 2
    assert metrics["ess"] == pytest.approx(25 / (1 + 0.25 + 4 + 2.25) / 4)  # (sum w)^2 / sum w^2 / n
    assert (metrics["masked"], metrics["masked_rows"]) == (0, 0)
    assert corrected([[1.0, 0.5, 8.0]], max_weight=10.0)[0] == [[1.0, 0.5, 8.0]]


def test_sequence_weights_are_the_product_over_the_tokens_of_the_model() -> None:
    mask = [[True, False, True], [True, True]]
    weights, kept, metrics = corrected([[0.5, 9.0, 0.5], [2.0, 3.0]], mask, weighting="sequence", max_weight=4.0)
    assert weights == [[0.25, 1.0, 0.25], [4.0, 4.0]]  # 0.5 * 0.5, the tool's token left out; 6 is cut off
    assert kept == mask
    assert metrics["truncated"] == 0.5
    assert metrics["ess"] == pytest.approx(4.25**2 / (0.25**2 + 16) / 2)  # each trajectory once


def test_a_long_row_is_weighed_by_its_sum_and_masked_by_its_mean() -> None:
    row = [[1.01] * 300]
    assert corrected(row, weighting="sequence", max_weight=100.0)[0][0][0] == pytest.approx(1.01**300, rel=1e-4)
    geometric = {"weighting": "none", "masking": "geometric"}
    assert corrected(row, **geometric, min_ratio=0.99, max_ratio=1.02)[1] == [[True] * 300]
    assert corrected(row, **geometric, min_ratio=0.99, max_ratio=1.005)[1] == [[False] * 300]
    assert corrected(row, weighting="none", masking="sequence", max_ratio=19.0)[1] == [[False] * 300]  # 1.01^300 = 19.8
    assert corrected(row, weighting="none", masking="sequence", max_ratio=20.0)[1] == [[True] * 300]


def test_masking_leaves_out_tokens_or_rows_and_keeps_the_bounds_themselves() -> None:
    ratios = [[0.4, 0.5, 2.0, 2.5], [1.0]]
    weights, mask, metrics = corrected(ratios, weighting="none", masking="token", min_ratio=0.49, max_ratio=2.01)
    assert mask == [[False, True, True, False], [True]]
    assert weights == [[1.0] * 4, [1.0]]
    assert (metrics["masked"], metrics["masked_rows"], metrics["ess"]) == (2 / 5, 0, 3 / 5)
    _, mask, metrics = corrected([[2.0, 2.0], [1.0]], masking="sequence")
    assert mask == [[False, False], [True]]
    assert (metrics["masked"], metrics["masked_rows"]) == (2 / 3, 1)
    assert metrics["weight/mean"] == 1.0


def test_only_the_tokens_of_the_newest_weights_of_a_response_are_kept() -> None:
    ones, versions = [[1.0] * 6, [1.0] * 2], [[0, 0, 0, 2, 2, 2], [1, 1]]
    assert corrected(ones, versions=versions, newest_only=True)[1] == [[False] * 3 + [True] * 3, [True, True]]
    tool = [[True] * 5 + [False], [True, True]]
    late = [[0, 0, 0, 1, 1, 2], [1, 1]]  # what a tool has added last is of no version
    assert corrected(ones, tool, late, newest_only=True)[1][0] == [False] * 3 + [True] * 2 + [False]
    assert corrected(ones, versions=versions)[1] == [[True] * 6, [True, True]]
    assert RolloutCorrection().needs() == {"policy_version": False}
    assert RolloutCorrection(newest_only=True).needs() == {"policy_version": True}


@pytest.mark.parametrize("weighting", ["token", "sequence"])
@pytest.mark.parametrize("masking", ["none", "token", "sequence", "geometric"])
def test_random_rows_with_holes_agree_with_the_formulas(weighting: str, masking: str) -> None:
    rows = Rows.of([f"u{number}" for number in range(len(ORACLE["uid"]))])
    names = ("old_log_probs", "rollout_log_probs")
    columns = {name: Token.of(rows, ORACLE[name], "float") for name in names}
    mask = Token.of(rows, ORACLE["response_mask"], "bool")
    node = RolloutCorrection(
        weighting=weighting, masking=masking, max_weight=1.1, **({} if masking == "none" else {"min_ratio": 0.8})
    )  # type: ignore[arg-type]
    out = node.run(**columns, response_mask=mask)
    for number, kept in enumerate(ORACLE["response_mask"]):
        pairs = zip(ORACLE["old_log_probs"][number], ORACLE["rollout_log_probs"][number], kept, strict=True)
        logs = [old - rollout if inside else None for old, rollout, inside in pairs]
        inside = [log for log in logs if log is not None]
        of_row = {"sequence": sum(inside), "geometric": sum(inside) / len(inside)}
        for position, log in enumerate(logs):
            weight = out.importance_weights.jagged[number][position]
            ratio = math.exp(of_row.get(masking, log or 0.0))
            right = log is not None and (masking == "none" or 0.8 <= ratio <= 2.0)
            expected = 1.0 if log is None else min(math.exp(of_row.get(weighting, log)), 1.1)
            assert weight == pytest.approx(expected, rel=1e-6)
            assert out.corrected_mask.jagged[number][position] == right


def test_extreme_ratios_stay_finite() -> None:
    rows = Rows.of(["a"])
    old, rollout = Token.of(rows, [[-400.0, -0.1]], "float"), Token.of(rows, [[-0.1, -400.0]], "float")
    mask = Token.of(rows, [[True, True]], "bool")
    for weighting in ("token", "sequence"):
        out = RolloutCorrection(weighting=weighting, max_weight=1e9).run(old, rollout, mask)  # type: ignore[arg-type]
        assert np.isfinite(out.importance_weights.values).all()
    assert RolloutCorrection(max_weight=1e9).run(old, rollout, mask).importance_weights.values[1] == pytest.approx(
        math.exp(20), rel=1e-6
    )


def test_a_log_probability_that_is_not_finite_is_named_and_one_outside_the_mask_is_nobodys_business() -> None:
    rows = Rows.of(["a", "b"])
    old = Token.of(rows, [[-1.0], [-1.0, -1.0]], "float")
    rollout = Token.of(rows, [[-1.0], [-1.0, math.nan]], "float")
    with pytest.raises(ValueError, match="rollout_log_probs of b_0_0 has a value that is not finite"):
        RolloutCorrection().run(old, rollout, Token.of(rows, [[True], [True, True]], "bool"))
    out = RolloutCorrection().run(old, rollout, Token.of(rows, [[True], [True, False]], "bool"))
    assert out.importance_weights.values.tolist() == [1.0, 1.0, 1.0]


def test_nothing_to_correct_reports_nothing() -> None:
    assert corrected([[], []]) == ([[], []], [[], []], {})
    assert corrected([[2.0]], [[False]])[2] == {}


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"weighting": "none"}, "this corrects nothing"),
        ({"max_weight": 3.0, "weighting": "none", "masking": "token"}, "max_weight has no effect with weighting: none"),
        ({"max_ratio": 3.0}, "max_ratio has no effect with masking: none"),
        ({"max_weight": 0.5}, "greater than or equal to 1"),
    ],
)
def test_settings_that_do_nothing_are_refused(settings: dict[str, Any], fact: str) -> None:
    with pytest.raises(ValidationError, match=fact):
        RolloutCorrection(**settings)


def test_the_effective_share_is_1_for_equal_weights_and_that_of_one_for_a_single_one() -> None:
    assert effective_share(np.array([3.0, 3.0])) == 1.0
    assert effective_share(np.array([0.0, 5.0, 0.0, 0.0])) == 0.25
    assert effective_share(np.zeros(3)) == 0.0
