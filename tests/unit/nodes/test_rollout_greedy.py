"""`rollout.greedy`: one response to each prompt, the likeliest token each time, from the other rollout's engine."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flowrl.batch import Prompt
from flowrl.metrics import collect
from flowrl.node import Context
from flowrl.nodes._backend.engine import engines_of
from flowrl.nodes.rollout.generate import Generate
from flowrl.nodes.rollout.greedy import Greedy
from flowrl.rows import Rows

TEXTS = ["1+2=", "41+17=", "9+30=", "8+8="]


def rolled(node: Any, context: Context, texts: list[Any] = TEXTS) -> dict[str, list[int]]:
    """Response ids by row."""
    num = len(texts)
    prompt = Prompt(Rows([f"u{i}" for i in range(num)], planned=[4] * num, settled=[0] * num), texts)
    node.setup(context)
    field = "greedy_response_ids" if isinstance(node, Greedy) else "response_ids"
    found = {}
    for out in node.run(prompt):
        assert out.rows.planned.tolist() == [1 if isinstance(node, Greedy) else 4] * out.rows.num_groups
        found |= dict(zip(out.rows.names(), (row.tolist() for row in getattr(out, field).jagged), strict=True))
    return found


def test_it_is_the_first_session_of_a_rollout_that_is_as_cold(context: Context) -> None:
    cold = rolled(Generate(max_tokens=6, temperature=1e-4), context)
    greedy = rolled(Greedy(max_tokens=6), context)
    assert greedy == {f"u{i}_0_0": cold[f"u{i}_0_0"] for i in range(4)}
    assert len(engines_of(context)) == 1, "both generate from one copy of the weights"


def test_what_it_reports_is_not_of_the_rollout(context: Context) -> None:
    with collect() as report:
        rolled(Greedy(max_tokens=6), context)
    assert {name.partition("/")[0] for name in report.metrics} == {"greedy"}


def test_a_prompt_without_tokens_is_one_failed_session(context: Context) -> None:
    with collect() as report:
        assert set(rolled(Greedy(max_tokens=6), context, ["1+1=", ""])) == {"u0_0_0"}
    assert [failure.rows for failure in report.failures] == [("u1_0_0",)]


def test_it_has_no_temperature() -> None:
    with pytest.raises(ValidationError, match="temperature"):
        Greedy(max_tokens=6, temperature=1.0)  # type: ignore[call-arg]
