"""Mathematical answers are compared by value; the last one in a response counts."""

from __future__ import annotations

import threading
import time
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


GOLDS = r"""
\begin{pmatrix} 1 \\ 2 \end{pmatrix}
\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}
\begin{pmatrix} -1/3 & 0 \\ 2/3 & 1 \end{pmatrix}
4x^2 \text{ cm}
\log_2 3
\text{June 20}
x=2 \text{ or } x=3
6\text{ and }7
\text{Evelyn}
\text{even}
\$36
\$18.90
\frac{270}7\text{ degrees}
10\%
(3, \frac{\pi}{2})
\left( 3, \frac{\pi}{2} \right)
[0, 1)
(-\infty, 2)\cup(3,\infty)
5.4 \text{ cents}
\text{(C)}
\textbf{(B)}
\text{Friday}
-\frac{1}{2}
2\sqrt{3}
90^\circ
1{,}000
x^2+2x+1
3\frac{1}{2}
\{1,2,3\}
11_2
p - q
\text{no solution}
\frac{14}{3}
\frac43
\frac{\sqrt{3}}{3}
\dfrac{9}{7}
\tfrac12
-2 + 7i
e^{i\pi/4}
1,-2
2516_8
4210_{7}
72
1\frac{4}{5}
\pi
\frac{3}{2}\pi
10\sqrt{2} - 5
x \in [-2,7]
x \le 3
x > 5
[-2,7]
(-\infty,0)
(0,9) \cup (9,36)
\emptyset
y = 2x + 3
2k+2
3x-1
5x^2 - 3xy + 2
\frac{1}{x+1}
\sin^2 x
70 \text{ feet}
15\mbox{ cm}^2
8 \text{ square units}
12\,\text{cm}
1.36
.35
-0.5
2^{10}
10!
\binom{5}{2}
\lfloor x \rfloor
|x|
60^\circ
2:3
3:45
\text{5:00 PM}
\text{A}
A
\text{C and D}
\text{A, B, C}
1,2,3
(1,2,3)
(1,2), (3,4)
\left(\frac{3}{2},-13\right)
\text{East}
\text{Navin}
\text{ellipse}
\text{odd}
\text{Yes}
\text{Monday and Tuesday}
x = 1, y = 2
(x+2)(x-3)
\sqrt[3]{2}
\overline{AB}
0.\overline{3}
1.\overline{27}
\infty
-\infty
a=b
\pm 2
3 \pm 2\sqrt{2}
\frac{-1 \pm \sqrt{5}}{2}
12,345
1,000,000
18
025
204
073
5 \cdot 10^3
3.2 \times 10^{4}
\mathrm{cm}
7 \mathrm{~m}
50\text{ miles per hour}
\text{6 and 7}
\$1{,}200
\$ 5
5\text{ dollars}
5 dollars
1 1/2
1/2
A \cup B
\mathbb{R}
n^2 - n
f(x) = x+1
\sqrt{13}
(5, \infty)
(6,31,-1)
y=\frac{1}{2}x
\begin{pmatrix} \sqrt{2} \\ \pi \end{pmatrix}
\left[ 2, 3 \right]
\{ -1, 0, 1 \}
-3, 2
Paris
not possible
True
False
June 20
\text{Saturday, May 3}
3 \text{ hours } 20 \text{ minutes}
9\text{:}30
\ln 2
\log 5
\arctan \frac{1}{2}
120^{\circ}
\angle ABC
\triangle ABC
AB
x+y
2x
\text{None}
\text{all real numbers}
\text{\$5}
\text{2,3}
\boxed{3}
$5$
$\frac12$
\( 5 \)
\[ 5 \]
$$5$$
$x=5$
-10
+5
−5
½
½ cup
√2
π
2π
3×10^4
x²
∞
5°
10%
50 percent
7^{th}
2^{\text{nd}}
\text{3 apples}
""".strip().split("\n")
"""Expected answers as MATH, AIME and GSM8K have them, and other people write them."""


@pytest.mark.parametrize("response", [r"So it is $\boxed{GOLD}$.", "2 steps\n#### GOLD", "GOLD"])
def test_an_answer_equals_itself_however_it_is_marked(response: str) -> None:
    found, report = scores([(response.replace("GOLD", gold), gold) for gold in GOLDS])
    assert {gold for gold, score in zip(GOLDS, found, strict=True) if score != 1.0} == set()
    assert not report.failures


def test_no_answer_equals_a_number_that_is_none_of_it() -> None:
    found, report = scores([(r"\boxed{77}", gold) for gold in GOLDS])
    assert set(found) == {0.0}
    assert not report.failures


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", [r"\begin{bmatrix}1\\2\end{bmatrix}"],
         [r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}", "2"]),
        (r"4x^2 \text{ cm}", ["4x^2"], ["4x^3", "4", "2"]),
        (r"\log_2 3", [r"\log_{2}3", r"\frac{\ln 3}{\ln 2}"], ["3", r"\log_3 2"]),
        (r"\text{June 20}", ["June 20", "june 20"], ["20", r"\text{July 20}", r"\text{June 21}"]),
        (r"x=2 \text{ or } x=3", ["2,3", r"x=3 \text{ or } x=2"], ["3", "x=2"]),
        (r"6\text{ and }7", ["6,7", "6 and 7"], ["7", "6,8"]),
        (r"\text{Evelyn}", ["Evelyn", r"\textbf{Evelyn}"], ["Eve", r"\text{Briana}", "7"]),
        ("even", [r"\text{even}", "Even"], ["odd", "2"]),
        (r"\$36", ["36", r"\$36.00"], ["37", "3"]),
        (r"\$18.90", ["18.9"], ["18", "18.09"]),
        (r"\frac{270}7\text{ degrees}", [r"\frac{270}{7}", r"\frac{270}{7}^\circ"], [r"\frac{27}{7}"]),
        ("1 1/2", ["1.5", r"1\frac12", "3/2"], ["1", "11/2", "1 1/3"]),
        ("-1.5", ["-1 1/2"], ["1 1/2"]),
        (r"10\%", ["0.1", "10", "10 percent"], [r"11\%"]),
        (r"(3, \frac{\pi}{2})", [r"\left(3,\pi/2\right)"], [r"(3, \pi)", "3"]),
        ("[0, 1)", [r"\left[0,1\right)"], ["[0,1]", "(0,1)", "0"]),
        (r"(-\infty, 2)\cup(3,\infty)", [r"(3,\infty)\cup(-\infty,2)"], [r"(-\infty,2)", r"(-\infty,2]\cup(3,\infty)"]),
        (r"5.4 \text{ cents}", ["5.4", "5.4 cents"], ["5.5", "5"]),
        (r"\text{(C)}", ["C", "(C)", r"\textbf{(C)}"], ["B", r"\text{(B)}"]),
        (r"2\sqrt{3}", [r"\sqrt{12}", "2√3"], [r"3\sqrt{2}", "2"]),
        (r"90^\circ", ["90", "90°"], ["91", "9"]),
        ("1{,}000", ["1000", "1,000", "1 000"], ["1", "10000"]),
        ("11_2", ["11_{2}"], ["11_3", "10_2"]),
        ("p - q", ["-q+p"], ["q-p", "p"]),
        (r"\text{no solution}", ["No solution"], ["0", "solution"]),
        (r"3 \text{ hours } 20 \text{ minutes}", [], [r"3 \text{ hours } 30 \text{ minutes}", "3"]),
        (r"2\pi", ["2 pi", "2π"], ["2"]),
        ("xy + 2", ["2 + yx"], ["2"]),
        (r"\frac{1}{23}", [r"\frac1{23}"], [r"\frac{12}{3}"]),
        ("x^{12}", [], ["x^{1}2"]),
        (".5", ["0.5"], ["5", "5."]),
        ("12", [], [r"1\ 2", r"1\,2", "1~2"]),
        ("2 3", [], ["3", "5", "6", "23"]),
        ("5", ["5 dollars", "5.", "5,", "x = 5"], ["2 3", "5.5"]),
        (r"0.\overline{3}", [r"\frac13"], [r"0.\overline{4}", "0.3"]),
    ],
)  # fmt: skip
def test_another_form_is_right_and_another_answer_is_wrong(answer: str, right: list[str], wrong: list[str]) -> None:
    found, report = scores([(rf"\boxed{{{text}}}", answer) for text in [*right, *wrong]])
    assert found == [1.0] * len(right) + [0.0] * len(wrong)
    assert not report.failures


@pytest.mark.parametrize(
    "response",
    ["**5**", "*5*", "`5`", "__5__", "_5_", "***5***", "```\n5\n```", "**$5$**", "The answer is **5**.", "It is `5`",
     "**It is 5**", "#### 5\nDone in 3 steps.", "####\n5\n\nDone in 3 steps.", "#### **5**\n3 steps",
     "#### $5\n3 steps",
     "#### 5 apples\nin 3 steps.", "#### x = 5\nin 3 steps", "#### 1\n#### 5\n3 steps", "#### Step 1\nso it is 5",
     "#### 2. Add them\nso it is 5", r"\boxed{7} no, \boxed{5.}", "= 5", "=> 5", "a) 5", "2 3 5"],
)  # fmt: skip
def test_marks_around_an_answer_and_what_follows_it_do_not_count(response: str) -> None:
    assert scores([(response, "5"), (response, "3")])[0] == [1.0, 0.0]


@pytest.mark.parametrize("unit", ["\\boxed{", "*a", "_a _b ", "$ ", "####\n", "{", "\\text{", "1 1/", "9", "."])
def test_a_long_response_costs_little_time_and_its_failure_few_words(unit: str) -> None:
    start = time.monotonic()
    _, report = scores([(unit * 5000, "5")], seconds=1)
    assert time.monotonic() - start < 6
    assert all(len(failure.error) < 300 for failure in report.failures)


@pytest.mark.parametrize("answer", ["", " ", "?", r"\boxed{}", "$$", r"\frac{1}{", "it depends on the weather"])
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
