"""`evaluate.accuracy`: what it reports of each source, and what becomes of rows that were not scored."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.batch import Prompt, Sample
from flowrl.metrics import collect
from flowrl.nodes.evaluate.accuracy import Accuracy, final_answer
from flowrl.rows import Rows


def rows_of(*sizes: int, planned: int = 4) -> Rows:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    sessions = [session for size in sizes for session in range(size)]
    num = [planned] * len(sizes)
    return Rows([f"val:u{group}" for group in range(len(sizes))], groups, sessions, planned=num, settled=num)


def reported(node: Accuracy, rewards: list[float | None], *sizes: int, **columns: Any) -> dict[str, float]:
    rows = rows_of(*sizes, planned=node.samples)
    with collect() as report:
        node.run(
            Sample(rows, rewards),  # type: ignore[arg-type]
            Sample(rows, columns["response"]) if "response" in columns else None,
            Prompt(rows, columns["data_source"]) if "data_source" in columns else None,
        )
    return {name: metric.value for name, metric in report.metrics.items()}


def test_all_that_is_reported_of_two_rows() -> None:
    found = reported(
        Accuracy(samples=4), [1, 0, 0, 0, 1, 1, 0, 0], 4, 4, response=["7", "8", "8", "8", " 3", "3 ", "2", "1"]
    )
    assert found == pytest.approx({
        "val/val/rows": 2, "val/val/unscored": 0, "val/val/mean@4": 3 / 8, "val/val/pass@1": 3 / 8,
        "val/val/pass@2": (1 / 2 + 5 / 6) / 2, "val/val/pass@4": 1.0, "val/val/maj@4": 0.5,
    })  # fmt: skip


def test_sources_are_kept_apart_and_an_unnamed_one_has_the_name_of_the_data_set() -> None:
    found = reported(Accuracy(dataset="mixed"), [1.0, 0.0, 1.0, 0.5], 1, 1, 1, 1, data_source=["a/b", "", "a/b", "c"])
    assert {name: value for name, value in found.items() if "mean" in name} == {
        "val/a/b/mean@1": 1.0, "val/mixed/mean@1": 0.0, "val/c/mean@1": 0.5,
    }  # fmt: skip
    assert "val/c/maj@1" not in found  # the vote of one


def test_what_is_not_scored_is_counted_and_never_zero() -> None:
    # The third row lost all its sessions, the second one of them; a null is not scored either.
    found = reported(Accuracy(samples=2), [1.0, None, 1.0], 2, 1, 0, response=["a", "a", "b"])
    assert found["val/val/rows"] == 3
    assert found["val/val/unscored"] == 4
    assert found["val/val/mean@2"] == 1.0
    assert found["val/val/pass@1"] == 1.0
    assert "val/val/pass@2" not in found  # no row has two scored samples
    assert "val/val/maj@2" not in found


def test_without_any_score_there_are_only_counts() -> None:
    assert reported(Accuracy(samples=2), [None, math.nan], 1, 1) == {"val/val/rows": 2, "val/val/unscored": 4}


def test_a_threshold_says_what_is_right_and_float32_does_not_move_it() -> None:
    assert reported(Accuracy(threshold=0.3), [0.1 + 0.2, 0.29], 1, 1)["val/val/pass@1"] == 0.5
    assert reported(Accuracy(), [0.9 + 0.1, 0.99], 1, 1)["val/val/pass@1"] == 0.5
    assert reported(Accuracy(threshold=-1.0), [-2.0, -1.0], 1, 1)["val/val/pass@1"] == 0.5


def test_the_prefix_begins_every_name() -> None:
    assert all(name.startswith("greedy/val/") for name in reported(Accuracy(prefix="greedy"), [1.0], 1))


def test_the_last_output_of_a_session_has_its_reward() -> None:
    rows = Rows(["v"], [0, 0, 0], [0, 0, 1], [0, 1, 0], planned=[2], settled=[2])
    with collect() as report:
        Accuracy(samples=2).run(Sample(rows, [0.0, 1.0, 1.0]))
    assert report.metrics["val/val/mean@2"].value == 1.0


@pytest.mark.parametrize(
    ("text", "pattern", "answer"),
    [
        (" 42 ", None, "42"),
        ("Because\n7 > 3:  YES", None, "because 7 > 3: yes"),
        (r"so \boxed{\frac{1}{2}} and \boxed{ 3 }", None, "3"),
        (r"cut off \boxed{3", None, r"cut off \boxed{3"),
        ("think #### 12", None, "12"),
        ("", None, None),
        ("a=1 b=2", r"\w=(\d)", "2"),
        ("a=1 b=2", r"\w=\d", "b=2"),
        ("nothing", r"(\d)", None),
        ("x", r"x(y)?", None),
    ],
)
def test_the_final_answer_of_a_response(text: str, pattern: str | None, answer: str | None) -> None:
    import re

    assert final_answer(text, re.compile(pattern) if pattern else None) == answer


@pytest.mark.parametrize(
    "settings",
    [{"samples": 0}, {"temperature": -0.1}, {"temperature": math.nan}, {"max_tokens": 0}, {"max_rows": 0},
     {"answer_pattern": "("}, {"answer_pattern": ""}, {"dataset": ""}, {"threshold": math.inf}],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Accuracy(**settings)


def test_greedy_is_allowed() -> None:
    assert Accuracy(temperature=0.0, samples=2).asked().settings == (("temperature", 0.0),)
