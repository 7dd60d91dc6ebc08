"""Rewards by a rule: a pattern, the scorer of a task, the length."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
from pydantic import ValidationError

from flowrl.batch import Batch, Prompt, Sample, Step, Token
from flowrl.engine.call import NodeSetup
from flowrl.engine.scorer import Scorer
from flowrl.fields import FieldType
from flowrl.metrics import collect
from flowrl.node import Context
from flowrl.nodes.reward.overlong_penalty import OverlongPenalty
from flowrl.nodes.reward.reasoning_gym import ReasoningGym
from flowrl.nodes.reward.regex import Regex
from flowrl.registry import find
from flowrl.rows import Rows
from flowrl.testing import run_node


def matched(response: str, answer: str | None, **settings: Any) -> float:
    rows = Rows.of("a")
    given = {} if answer is None else {"answer": Prompt(rows, [answer])}
    node = Regex(**settings)
    assert node.needs() == {"answer": answer is not None}
    return float(run_node(node, response=Sample(rows, [response]), **given).reward.values[0])


@pytest.mark.parametrize(
    ("pattern", "response", "answer", "score"),
    [
        (r"answer: (\w+)", "answer: yes", "yes", 1),
        (r"answer: (\w+)", "answer: yes", " yes ", 1),
        (r"answer: (\w+)", "answer: yes", "no", 0),
        (r"answer: (\w+)", "yes", "yes", 0),
        (r"answer: (\w+)", "answer: no, answer: yes", "yes", 1),
        (r"\d+", "1 and 22", "22", 1),
        (r"(\d)(\d)", "12", "1", 1),
        (r"a(b)?", "a", "", 1),
        (r"(?s)<answer>(.*)</answer>", "<answer>\n4\n</answer>", "4", 1),
        (r"$", "", "x", 0),
    ],
)
def test_what_a_pattern_captures_last_is_compared(pattern: str, response: str, answer: str, score: float) -> None:
    assert matched(response, answer, pattern=pattern) == score


def test_a_pattern_is_compared_as_told() -> None:
    assert matched("1 2", "1", pattern=r"\d", last=False) == 1.0
    assert matched("Yes", "yes", pattern=r"\w+") == 0.0
    assert matched("Yes", "yes", pattern=r"\w+", ignore_case=True) == 1.0
    assert matched("a ", "a", pattern=r".+", strip=False) == 0.0
    assert matched("<think>x</think>", None, pattern=r"^<think>.*</think>$", compare=False) == 1.0
    assert matched("x", None, pattern=r"^<think>", compare=False) == 0.0


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(a", r"missing \), unterminated subpattern at character 1"),
        ("ab[", "unterminated character set at character 3"),
        ("a**", "multiple repeat at character 3"),
        ("(?<=a+)b", "look-behind requires fixed-width pattern"),
        ("", "at least 1 character"),
    ],
)
def test_a_wrong_pattern_is_refused_with_its_place(pattern: str, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Regex(pattern=pattern)


def test_a_pattern_that_takes_for_ever_costs_its_row_alone() -> None:
    rows = Rows.of("abc")
    columns = {"response": Sample(rows, ["aa", "a" * 64 + "b", "b"])}
    params = {"pattern": "^(a+)+$", "compare": False}
    spec = NodeSetup(
        "reward", find("reward.regex", Path()), params, None, {"response": ("response",)}, {}, (), "unscored", 0.5
    )
    scorer = Scorer(spec, Context(), can_kill=True)
    try:
        start = time.monotonic()
        with collect() as report:
            (reward,) = scorer.score(Batch(rows, columns, {"response": FieldType("Sample", "str")}))
        assert time.monotonic() - start < 5
    finally:
        scorer.close()
    assert np.array_equal(reward.values, [1.0, np.nan, 0.0], equal_nan=True)
    assert [failure.rows for failure in report.failures] == [("b_0_0",)]


def judged(responses: list[str], entry: Any, **settings: Any) -> tuple[list[float], list[str]]:
    rows = Rows.of("a" * len(responses))
    with collect() as report:
        out = run_node(ReasoningGym(**settings), response=Sample(rows, responses), entry=Prompt(rows, [entry]))
    return out.reward.values.tolist(), [failure.error for failure in report.failures]


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "word_sorting", "spell_backward", "countdown", "maze"])
def test_the_task_scores_its_own_answers(task: str) -> None:
    entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
    scores, errors = judged(
        [entry["answer"], f" {entry['answer']}\n", f"so <answer> {entry['answer']} </answer>"], entry
    )
    assert not errors
    assert scores == [1.0, 1.0, 1.0]


def test_an_answer_that_is_only_nearly_right_gets_what_the_task_gives() -> None:
    dataset = reasoning_gym.create_dataset("leg_counting", size=1, seed=3)
    scores, _ = judged(["no number", "", "<answer>1</answer><answer>2</answer>"], dataset[0])
    assert scores == pytest.approx([dataset.score_answer(text, dataset[0]) for text in ("no number", "", "2")])


def test_tags_are_left_alone_where_asked() -> None:
    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=3)[0]
    text = f"<answer>{entry['answer']}</answer>"
    assert judged([text], entry)[0] == [1.0]
    assert judged([text], entry, answer_tag=False)[0] != [1.0]


@pytest.mark.parametrize(
    "entry", [None, "text", {}, {"metadata": {}}, {"metadata": {"source_dataset": "no_such_task"}}]
)
def test_an_entry_of_no_task_is_a_failure(entry: Any) -> None:
    scores, errors = judged(["1"], entry)
    assert math.isnan(scores[0])
    assert len(errors) == 1


@pytest.mark.parametrize(("length", "penalty"), [(0, 0), (6, 0), (7, -0.25), (9, -0.75), (10, -1), (12, -1)])
def test_the_overlong_penalty_grows_over_the_buffer(length: int, penalty: float) -> None:
    rows = Rows.of("a")
    given = {"response_mask": Token.of(rows, [[True] * length], "bool"), "max_tokens": Step(rows, 10)}
    assert run_node(OverlongPenalty(buffer=4), **given).overlong_penalty.values[0] == pytest.approx(penalty)
    with pytest.raises(ValueError, match=r"buffer: 11 is longer than a response may be \(max_tokens: 10\)"):
        run_node(OverlongPenalty(buffer=11), **given)
    assert run_node(OverlongPenalty(buffer=4, factor=0.5), **given).overlong_penalty.values[0] == pytest.approx(
        penalty / 2
    )
