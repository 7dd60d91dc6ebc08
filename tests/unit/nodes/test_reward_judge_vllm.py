"""A judge by the real vLLM gives the verdicts of the one by transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.batch import Sample
from flowrl.metrics import collect
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes.reward.judge_model import JudgeModel
from flowrl.rows import Rows


def verdicts(engine: Any) -> list[float]:
    node = JudgeModel(engine=engine, template="{response}", parse=r"(\d+)", scale="none", max_tokens=4)
    node.setup(Context(models={"judge": ModelSpec(path="arith-tiny")}, model="judge"))
    try:
        with collect() as report:
            rows = Rows.of("abcde")
            found = node.run(Sample(rows, ["20+30=", "2+3=", "what?", "1+", "9-1="]))
    finally:
        node.close()
    assert [failure.rows for failure in report.failures] == [("c_0_0",)]
    scores: list[float] = found.reward.values.tolist()
    return scores


def test_vllm_judges_as_transformers_does() -> None:
    assert np.array_equal(verdicts("vllm"), verdicts("transformers"), equal_nan=True)
