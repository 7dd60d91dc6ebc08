"""The table of samples: what people read of a step, whatever the nodes wrote and in whatever order it arrived."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import flowrl
from flowrl.batch import Batch, Json, Prompt, PromptToken, Sample, Token
from flowrl.engine.local import LocalCluster
from flowrl.engine.samples import Sampler, sampled, table
from flowrl.fields import FieldType
from flowrl.rows import Rows
from flowrl.schedule.record import Level, Recorder, Samples

FAKE = {
    "flowrl": 1,
    "name": "fake",
    "models": {"policy": {"path": "arith-tiny"}},
    "data": {"train": {"type": "arithmetic", "size": 64}},
    "batch": {"prompts": 8, "group": 4},
    "pools": {"generate": {"workers": 1}},
    "nodes": {
        "rollout": {
            "use": "rollout.generate",
            "model": "policy",
            "pool": "generate",
            "engine": "fake",
            "max_tokens": 8,
        },
        "exact": {"use": "reward.exact_match", "writes": {"reward": "exact"}},
        "long": {"use": "reward.length_penalty", "reads": {"reward": "exact"}, "writes": {"shaped_reward": "step"}},
        "total": {"use": "reward.weighted_sum", "reads": {"rewards": ["exact", "step"]}},
        "advantage": {"use": "advantage.grpo"},
    },
    "run": {"steps": 5, "samples": {"rows": 6, "every": 2}},
}


class Heard(Recorder):
    """Keeps tables and notes."""

    def __init__(self) -> None:
        self.tables: list[Samples] = []
        self.notes: list[str] = []

    def samples(self, samples: Samples) -> None:
        self.tables.append(samples)

    def note(self, text: str, level: Level = "info") -> None:
        self.notes.append(text)


def fake(folder: Path, **samples: int) -> dict[str, Any]:
    run = {"steps": 5, "samples": {"rows": 6, "every": 2} | samples, "dir": str(folder)}
    return FAKE | {"run": run}


def tables(folder: Path) -> dict[int, list[dict[str, Any]]]:
    return {int(path.stem[-6:]): pq.read_table(path).to_pylist() for path in folder.rglob("step_*.parquet")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs")
    flowrl.Pipeline(fake(folder)).run(local=True, quiet=True)
    return tables(folder)


def test_the_first_step_and_every_so_many_th_have_a_table_of_whole_groups(run: dict[int, list[dict[str, Any]]]) -> None:
    assert sorted(run) == [1, 2, 4]
    for step, rows in run.items():
        assert len(rows) == 8
        assert len({row["uid"] for row in rows}) == 2
        assert [row["session"] for row in rows] == [0, 1, 2, 3] * 2
        assert {row["step"] for row in rows} == {step}


def test_a_row_says_what_was_asked_answered_and_scored_in_every_part(run: dict[int, list[dict[str, Any]]]) -> None:
    for rows in run.values():
        for row in rows:
            assert list(row) == [
                "step", "uid", "session", "output", "prompt", "answer",
                "response", "finish_reason", "num_turns", "exact", "field_step", "reward",
                "prompt_length", "response_length",
            ]  # fmt: skip
            assert row["prompt"].endswith("=")
            assert row["exact"] == float(row["response"].strip() == row["answer"])
            assert row["reward"] == pytest.approx(row["exact"] + row["field_step"])
            assert row["response_length"] > 0
            assert row["prompt_length"] > 0


def test_no_rows_means_no_table_and_no_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalCluster, "fetch", lambda *_: pytest.fail("nothing is read back"))
    flowrl.Pipeline(fake(tmp_path, rows=0)).run(local=True, quiet=True)
    assert tables(tmp_path) == {}


def test_samples_that_cannot_be_read_back_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(self: LocalCluster, refs: Sequence[Any]) -> list[Any]:
        raise OSError("the object is lost")

    monkeypatch.setattr(LocalCluster, "fetch", fetch)
    result = flowrl.Pipeline(fake(tmp_path)).run(local=True, quiet=True)
    assert len(result.metrics) == 5
    assert "step 4: no table of samples: OSError: the object is lost" in (result.folder / "log.txt").read_text()


def test_only_nodes_with_a_value_per_sample_are_asked_and_only_for_chosen_groups() -> None:
    plan = flowrl.Pipeline(FAKE).plan()
    sampler = Sampler(plan, LocalCluster(), Heard())
    rows = Rows([f"u{number}" for number in range(8)], planned=[4] * 8, settled=[0] * 8)
    sampler.begin(2, Batch(rows, {}, {}))
    nodes = plan.graph.nodes
    assert sampler.asked_of(nodes["total"], ["u1", "u2", "u0"]) == ("u1", "u0")
    assert sampler.asked_of(nodes["total"], ["u5"]) == ()
    assert sampler.asked_of(nodes["advantage"], ["u0"]) == ()
    sampler.leave(["u0", "u1", "u2", "u3", "u4"])
    sampler.begin(3, Batch(rows, {}, {}))
    assert sampler.asked_of(nodes["total"], ["u0"]) == ()


def test_what_nodes_write_becomes_native_whatever_it_is() -> None:
    rows = Rows.of(["b", "b", "a"])
    info = np.empty(3, dtype=object)
    info[:] = [{"n": np.int64(3), "ok": np.bool_(True), "x": np.float32(0.5), "nan": float("nan")}, "text\ud800", None]
    columns = {
        "reward": Sample[float](rows, np.array([np.nan, 1.5, np.inf], dtype=np.float32)),
        "info": Sample[Json](rows, info),
        "text": Sample[str](rows, np.array(["ö", "a\ud800b", ""], dtype=object)),
        "good": Sample[bool](rows, np.array([True, False, True])),
        "prompt_ids": PromptToken[int].of(rows, [[1, 2], [3]]),
        "response_ids": Token[int].of(rows, [[1], [1, 2, 3], []]),
        "loss_mask": Token[bool].of(rows, [[False], [False] * 3, []], "bool"),
    }
    dtypes = {"reward": "float", "info": "json", "text": "str", "good": "bool"}
    types: dict[str, FieldType] = {name: FieldType("Sample", dtype) for name, dtype in dtypes.items()}  # type: ignore[arg-type]
    types |= {"prompt_ids": FieldType("PromptToken", "int"), "response_ids": FieldType("Token", "int")}
    types |= {"loss_mask": FieldType("Token", "bool")}
    found = sampled(Batch(rows, columns, types), ["a", "b"], expands=True)
    assert found.columns == {
        "reward": [None, 1.5, float("inf")],
        "info": ['{"n": 3, "ok": true, "x": 0.5, "nan": null}', "text?", None],
        "text": ["ö", "a?b", ""],
        "good": [True, False, True],
    }
    assert found.lengths == {"prompt_length": [2, 2, 1], "response_length": [1, 3, 0]}
    assert sampled(Batch(rows, columns, types), ["a"], expands=False).lengths == {}
    assert sampled(Batch(rows, columns, types), ["c"], expands=True).keys == []


def test_a_table_is_joined_by_identity_and_sorted_whatever_arrives_first() -> None:
    rows = Rows.of(["b", "a", "b"], [1, 0, 0])
    prompts = Batch(Rows(["b", "a"]), {"prompt": Prompt(Rows(["b", "a"]), np.array(["B", "A"], dtype=object))},
                    {"prompt": FieldType("Prompt", "json")})  # fmt: skip
    kind = {"x": FieldType("Sample", "int"), "y": FieldType("Sample", "int")}
    first = sampled(Batch(rows, {"x": Sample(rows, np.array([1, 2, 3]))}, kind), "ab", expands=False)
    some = Rows.of(["a"])
    second = sampled(Batch(some, {"y": Sample(some, np.array([7]))}, kind), "ab", expands=False)
    for parts in ([first, second], [second, first]):
        found = table(3, prompts, parts, {"x": "int", "y": "int", "z": "str"})
        assert found.columns["prompt"] == ["B", "B", "A"]
        assert found.columns["x"] == [3, 1, 2]
        assert found.columns["y"] == [None, None, 7]
        assert found.columns["z"] == [None] * 3
        assert found.types["z"] == "str"
        assert found.rows[2][:4] == (3, "a", 0, 0)
