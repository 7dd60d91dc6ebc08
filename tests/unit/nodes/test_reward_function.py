"""A function of the user's as a reward: what it is given and may return; faults are in test_scorer_processes.py."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import flowrl
from flowrl.batch import Prompt, Sample
from flowrl.metrics import Report, collect
from flowrl.node import Context
from flowrl.nodes._backend.answers import BadAnswer, Crew, judgement, score_of
from flowrl.nodes.reward.function import Function
from flowrl.rows import Rows
from flowrl.testing import run_node

ROWS = Rows.of("aab")
COLUMNS = {
    "response": Sample(ROWS, ["x", "yy", "zzz"]),
    "prompt": Prompt(ROWS, ["first", "second"]),
    "answer": Prompt(ROWS, ["x", "zzz"]),
}


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Makes the node from the text of a function called `score`."""

    def made(text: str, **settings: Any) -> Function:
        (tmp_path / "mine.py").write_text(text)
        return Function(call=f"{tmp_path}/mine.py:score", **settings)

    return made


def run(node: Function, context: Context | None = None, **more: Any) -> tuple[Any, Report]:
    wanted = {name for name in COLUMNS if node.needs().get(name, True)}
    with collect() as report:
        out = run_node(node, context=context, **{n: c for n, c in COLUMNS.items() if n in wanted}, **more)
    return out, report


def by_row(out: Any) -> Mapping[str, tuple[float, Any]]:
    return dict(zip(out.reward.rows.names(), zip(out.reward, out.reward_info, strict=True), strict=True))


def test_a_function_gets_what_its_parameters_name(make: Any) -> None:
    node = make("def score(response, prompt, answer): return (response == answer) + 0.5 * (prompt == 'second')")
    out, report = run(node)
    assert list(out.reward) == [1.0, 0.0, 1.5]
    assert not report.failures
    assert make("def score(response): ...").needs() == {
        "prompt": False, "answer": False, "columns": False, "samples": False,
    }  # fmt: skip
    assert make("def score(response, answer=None): ...").needs() == {
        "prompt": False, "columns": False, "samples": False,
    }  # fmt: skip
    assert make("def score(**fields): ...").needs() == {}


def test_further_fields_go_by_their_names_in_any_order(make: Any) -> None:
    node = make("def score(response, turns, level): return 10 * level + turns")
    reads = {"columns": ("level",), "samples": ("turns",)}
    more = {"columns": [Prompt(ROWS, [1, 2])], "samples": [Sample(ROWS, [3, 4, 5])]}
    out, _ = run(node, Context(reads=reads), **more)
    assert list(out.reward) == [13.0, 14.0, 25.0]
    assert node.refuses({"response": ("response",), **reads}, 1) == ""
    assert "score() takes 'turns', which the node does not read" in node.refuses(
        {"response": ("response",), "columns": ("level",)}, 1
    )
    assert "score() takes no 'size'; it takes response, turns, level" in node.refuses(
        {"response": ("response",), **reads, "columns": ("level", "size")}, 1
    )


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("is_batch", [False, True])
def test_numbers_and_dicts_with_a_score_are_taken(make: Any, kind: str, is_batch: bool) -> None:
    single = "dict(score=len(response), right=response == answer, seen={1, 2})"
    several = f"[{single} for response, answer in zip(response, answer)]"
    node = make(f"{kind} score(response, answer): return {several if is_batch else single}", batch=is_batch)
    out, report = run(node)
    assert by_row(out) == {
        "a_0_0": (1.0, {"right": True, "seen": [1, 2]}),
        "a_1_0": (2.0, {"right": False, "seen": [1, 2]}),
        "b_0_0": (3.0, {"right": True, "seen": [1, 2]}),
    }
    assert not report.failures


@pytest.mark.parametrize("values", ["np.array([1, 0, 1])", "torch.tensor([True, False, True])", "(1.0, 0, True)"])
def test_a_batch_may_come_back_as_an_array(make: Any, values: str) -> None:
    out, _ = run(make(f"import numpy as np, torch\ndef score(response): return {values}", batch=True))
    assert list(out.reward) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("return 1.0", "it returned float, not a list with a value for each sample"),
        ("return 'abc'", "it returned str, not a list"),
        ("return [1.0]", "it returned 1 values for 3 samples"),
        ("return None", "it returned NoneType"),
    ],
)
def test_a_batch_of_the_wrong_size_is_refused_as_a_whole(make: Any, text: str, said: str) -> None:
    with pytest.raises(BadAnswer, match=re.escape(said)):
        run(make(f"def score(response): {text}", batch=True))


def test_more_numpy_in_the_info_becomes_json(make: Any) -> None:
    info = "{'b': np.bool_(1), 'i': np.int64(2), 'f': np.float32(0.5), 'a': np.ones(2), 'n': np.nan}"
    out, _ = run(make(f"import numpy as np\ndef score(response): return {{'score': np.float16(1), **{info}}}"))
    assert next(iter(out.reward_info)) == {"b": True, "i": 2, "f": 0.5, "a": [1.0, 1.0], "n": None}
    assert type(next(iter(out.reward_info))["b"]) is bool


def test_the_key_of_the_score_can_be_chosen(make: Any) -> None:
    out, _ = run(make("def score(response): return {'acc': True, 'score': 5}", reward_key="acc"))
    assert list(out.reward) == [1.0, 1.0, 1.0]
    assert next(iter(out.reward_info)) == {"score": 5}


@pytest.mark.parametrize(
    "value",
    [
        1,
        1.0,
        True,
        np.bool_(1),
        np.int8(1),
        np.float16(1),
        np.array(1.0),
        np.array(True),
        torch.tensor(1),
        Fraction(1),
        Decimal("1.0"),
    ],
    ids=repr,
)
def test_these_are_numbers(value: Any) -> None:
    assert score_of(value) == 1.0
    assert type(score_of(value)) is float


@pytest.mark.parametrize(
    "value", [None, "1", b"1", [1.0], {}, 1j, np.ones(1), np.array("1"), torch.ones(1), object(), int]
)
def test_these_are_none(value: Any) -> None:
    with pytest.raises(BadAnswer, match="which is no number"):
        score_of(value)


@pytest.mark.parametrize("value", [1e300, -1e39, Decimal("1e300"), 10**300])
def test_these_are_too_large_for_a_score(value: Any) -> None:
    with pytest.raises(BadAnswer, match=r"1?e\+\d+, which is more than a score can be \(3.4e\+38\)"):
        score_of(value)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -np.inf, np.float32("nan"), torch.tensor(float("nan")),
     Decimal("NaN"), Decimal("sNaN"), Decimal("-Infinity"), Decimal("1e400"), 10**400, 10**6000],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_these_are_no_scores(value: Any) -> None:
    with pytest.raises(BadAnswer, match="which is no score"):
        score_of(value)


def test_a_dict_without_the_score_says_what_it_holds() -> None:
    with pytest.raises(BadAnswer, match=r"a dict without 'score' \(its keys: 'acc', 'n'\)"):
        judgement({"acc": 1, "n": 2}, "score")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("score", "'score' names no function: write pkg.module:function or ./file.py:function"),
        ("no_such_module:score", "no module named 'no_such_module'"),
        ("./no_such_file.py:score", "cannot read the file './no_such_file.py'"),
        ("math:squareroot", "'math' has no function 'squareroot'; known: "),
        ("math:sqrtt", "'math' has no function 'sqrtt'; did you mean 'sqrt'?"),
        ("math:pi", "'pi' in math is no function, but float"),
        ("math:sqrt", "'math:sqrt' takes 'x' by position"),
        ("a b:score", "'a b' is neither a module"),
    ],
)
def test_what_cannot_be_called_is_refused_when_the_node_is_made(call: str, said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        Function(call=call)


def test_a_file_that_cannot_be_imported_is_told_with_its_line(make: Any) -> None:
    with pytest.raises(ValidationError, match="line 2, failed: NameError"):
        make("import os\nscore = nothing")


def test_async_calls_run_side_by_side_and_no_more_than_allowed(make: Any) -> None:
    text = """
import asyncio
running = [0, 0]
async def score(response):
    running[0] += 1
    running[1] = max(running)
    await asyncio.sleep(0.02)
    running[0] -= 1
    return running[1]
"""
    assert max(run(make(text, concurrency=2))[0].reward) == 2.0
    assert max(run(make(text + "\n# anew"))[0].reward) == 3.0


def test_what_an_async_function_opens_lives_from_call_to_call(make: Any) -> None:
    text = """
import asyncio
loops = set()
async def score(response):
    loops.add(id(asyncio.get_running_loop()))
    return len(loops)
"""
    node = make(text)
    node.setup(Context())
    for _ in range(3):
        assert [next(iter(out.reward)) for out in node.run(COLUMNS["response"])] == [1.0] * 3
    node.close()


def test_a_crew_works_beside_a_running_loop() -> None:
    crew = Crew()

    async def double(position: int) -> int:
        return 2 * position

    async def inside() -> dict[int, Any]:
        return dict(crew.as_done(3, double, 2, 1.0))

    assert asyncio.run(inside()) == {0: 0, 1: 2, 2: 4}
    assert dict(crew.as_done(3, double, 2, 1.0)) == {0: 0, 1: 2, 2: 4}
    crew.close()


def document(folder: Path, reward: Mapping[str, Any]) -> flowrl.Pipeline:
    rollout = {"use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 8}
    return flowrl.Pipeline(
        {
            "flowrl": 1, "name": "mine",
            "models": {"policy": {"path": "arith-tiny"}},
            "data": {"train": {"type": "arithmetic", "size": 8}},
            "batch": {"prompts": 2, "group": 2},
            "pools": {"generate": {"workers": 1}},
            "nodes": {
                "rollout": rollout, "reward": {"use": "reward.function", **reward},
                "advantage": {"use": "advantage.grpo"},
            },
            "run": {"steps": 1, "dir": str(folder / "runs")},
        },
        folder,
    )  # fmt: skip


def errors(pipeline: flowrl.Pipeline) -> list[str]:
    return [f"{p.code} {p.fact}" for p in pipeline.check() if p.severity == "error"]


def test_the_check_knows_what_the_function_reads(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(response, difficulty): return 1.0\ndef plain(response): return 1.0")
    (wrong,) = errors(document(tmp_path, {"call": "./mine.py:score"}))
    assert wrong.startswith("FR026 nodes.reward: ")
    assert "takes 'difficulty', which the node does not read; reads: {columns: [difficulty]}" in wrong
    (wrong,) = errors(document(tmp_path, {"call": "./mine.py:score", "reads": {"columns": ["difficulty"]}}))
    assert wrong.startswith("FR020 nodes.reward reads 'difficulty', which nothing writes")
    (wrong,) = errors(document(tmp_path, {"call": "./mine.py:scored"}))
    assert wrong.startswith("FR007 nodes.reward.call: ")
    assert "did you mean 'score'?" in wrong
    assert not errors(document(tmp_path, {"call": "./mine.py:plain"}))


def test_fields_of_the_pipeline_reach_the_function_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(response, num_turns, answer): return num_turns + len(answer) / 100")
    reward = {"call": "./mine.py:score", "reads": {"samples": ["num_turns"]}}
    result = document(tmp_path, reward).run(local=True, quiet=True)
    assert 1.0 < result.metrics[0]["reward/mean"] < 1.1
