"""`filter.truncated`: what was cut off is not trained on."""

from __future__ import annotations

import numpy as np

from flowrl.batch import Sample, Token
from flowrl.metrics import collect
from flowrl.nodes.filter.truncated import Truncated
from flowrl.rows import Rows


def masked(reasons: list[str], rows: Rows, other: list[list[bool]] | None = None) -> tuple[list[list[bool]], float]:
    mask = Token[bool].of(rows, [[True, False, True]] * len(rows), "bool")
    more = None if other is None else Token[bool].of(rows, other, "bool")
    with collect() as report:
        out = Truncated().run(Sample(rows, np.array(reasons, dtype=object)), mask, more)
    return [part.tolist() for part in out.corrected_mask.jagged], report.metrics["groups/truncated"].value


def test_a_response_that_was_cut_off_is_masked_and_counted() -> None:
    rows = Rows(["u1"], [0, 0, 0], [0, 1, 2])
    found, num_cut = masked(["stop", "length", "abort"], rows)
    assert found == [[True, False, True], [False, False, False], [True, False, True]]
    assert num_cut == 1


def test_a_session_of_several_outputs_is_judged_by_its_last() -> None:
    rows = Rows(["u1"], [0, 0, 0], [0, 0, 1], [0, 1, 0])
    found, num_cut = masked(["stop", "length", "stop"], rows)
    assert found == [[False] * 3, [False] * 3, [True, False, True]]
    assert num_cut == 1


def test_an_output_that_was_cut_off_is_masked_where_its_session_went_on() -> None:
    rows = Rows(["u1"], [0, 0, 0, 0, 0], [0, 1, 0, 1, 0], [2, 1, 1, 0, 0])
    found, num_cut = masked(["stop", "length", "length", "stop", "length"], rows)
    kept = [True, False, True]
    assert found == [kept, [False] * 3, [False] * 3, [False] * 3, [False] * 3]
    assert num_cut == 2


def test_it_goes_with_another_mask() -> None:
    rows = Rows(["u1"], [0, 0], [0, 1])
    found, _ = masked(["stop", "length"], rows, [[True, True, False], [True, True, True]])
    assert found == [[True, False, False], [False, False, False]]
