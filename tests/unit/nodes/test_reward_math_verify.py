"""Mathematical answers are compared by value; the last one in a response counts."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from flowrl.batch import Prompt, Sample
from flowrl.metrics import Report, collect
from flowrl.nodes.reward.math_verify import MathVerify
from flowrl.rows import Rows
from flowrl.testing import run_node


def scores(pairs: list[tuple[str, str]], **settings: Any) -> tuple[list[float], Report]:
    rows = Rows.of([f"u{index}" for index in range(len(pairs))])
    responses, answers = zip(*pairs, strict=True)
    with collect() as report:
        out = run_node(MathVerify(**settings), response=Sample(rows, responses), answer=Prompt(rows, answers))
    return out.reward.values.tolist(), report


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("the answer is 12", "12", 1),
        ("12", "12", 1),
        ("12.", "12", 1),
        ("13", "12", 0),
        ("", "12", 0),
        ("no idea", "12", 0),
        ("-12", "12", 0),
        ("first 5, then 7, so 12", "12", 1),
        ("the answer is 12. Wait: the answer is 13", "13", 1),
        ("the answer is 12. Wait: the answer is 13", "12", 0),
        (r"\boxed{12}", "12", 1),
        (r"so \boxed{1}, no, \boxed{2}", "2", 1),
        (r"so \boxed{1}, no, \boxed{2}", "1", 0),
        (r"\boxed{12} is what I get, with 3 steps", "12", 1),
        (r"\boxed{5} and then \boxed{6", "5", 1),
        (r"$\boxed{\frac{1}{2}}$", "0.5", 1),
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1),
        (r"\boxed{x=12}", "12", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{(2, 1)}", "(1,2)", 0),
        ("$x^2+2x+1$", "(x+1)^2", 1),
        ("3", r"3\sqrt{2}", 0),
        ("1/2", r"\frac12", 1),
        ("5 + 7 = 12\n#### 12", "5 plus 7 is <<5+7=12>>12\n#### 12", 1),
        ("#### 1,234", "#### 1234", 1),
        ("#### 1 and #### 2", "#### 2", 1),
        ("1,000,000", "1000000", 1),
        ("1e5", "100000", 1),
        ("100000", "1e5", 1),
        (r"\boxed{1.5e-3}", "0.0015", 1),
        ("50%", "0.5", 1),
        ("$12", "12", 1),
        ("12 apples", "12", 1),
        ("72.0", "72", 1),
        ("<think>3 or 5?</think> It is 4.", "4", 1),
        ("\ud800 5", "5", 1),
    ],
)
def test_the_last_answer_is_compared_by_value(response: str, answer: str, score: float) -> None:
    found, report = scores([(response, answer)])
    assert found == [score]
    assert not report.failures


@pytest.mark.parametrize("answer", ["", "Paris", "it depends on the weather"])
def test_an_expected_answer_that_is_no_mathematics_is_a_failure_and_no_zero(answer: str) -> None:
    found, report = scores([("12", "12"), ("12", answer), ("13", "12")])
    assert np.array_equal(found, [1, np.nan, 0], equal_nan=True)
    assert [failure.rows for failure in report.failures] == [("u1_0_0",)]
    assert "is no mathematics" in report.failures[0].error


def test_a_formula_that_explodes_is_a_failure_in_time() -> None:
    found, report = scores([(r"\boxed{10^{10^{10}}}", "5"), ("5", "5")], seconds=1)
    assert np.array_equal(found, [np.nan, 1], equal_nan=True)
    assert report.failures[0].error.startswith("TimeoutException")


def test_it_works_outside_the_main_thread_where_no_alarm_rings() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(scores([(r"\boxed{2}", "2"), ("3", "2")])[0]))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


def test_numbers_are_compared_to_as_many_places_as_asked() -> None:
    assert scores([("3.1416", "3.14159265")], places=2)[0] == [1.0]
    assert scores([("3.1416", "3.14159265")], places=6)[0] == [0.0]
