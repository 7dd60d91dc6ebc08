"""Toy batches, a node run without an engine, the plan asserted, and `flowrl test-node`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field
from typer.testing import CliRunner

import flowrl
from flowrl.batch import Batch, Json, Prompt, Sample, Step, Token
from flowrl.cli import app
from flowrl.fields import AXES, DTYPES, FieldType
from flowrl.metrics import collect, metric
from flowrl.node import Context, Node
from flowrl.registry import find
from flowrl.rows import Rows
from flowrl.testing import assert_plan, run_node, toy_batch
from flowrl.wire import from_arrow, to_arrow

ROOT = Path(__file__).parents[2]
EVERY_TYPE = {f"{axis}_{dtype}": FieldType(axis, dtype) for axis in AXES for dtype in DTYPES}


def test_a_toy_batch_is_small_ragged_and_awkward() -> None:
    batch = toy_batch({"ids": "Token[int]", "mask": "Token[bool]", "reward": "Sample[float]", "info": "Sample[json]"})
    assert np.bincount(batch.rows.group).tolist() == [2, 3, 1]
    assert batch.rows.keys() == sorted(batch.rows.keys())
    ids, mask, reward, info = batch.columns.values()
    assert isinstance(ids, Token)
    assert isinstance(mask, Token)
    assert {0, 1} < set(ids.lengths.tolist())
    assert ids.values.min() >= 2
    assert ids.values.max() < 20
    assert np.array_equal(ids.offsets, mask.offsets)
    assert not mask.values.all()
    assert mask.values.any()
    assert np.isnan(reward.values).sum() == 1
    assert list(info).count(None) == 1


@pytest.mark.parametrize("name", EVERY_TYPE)
def test_there_is_a_column_for_every_type_and_it_can_be_stored(name: str) -> None:
    batch = toy_batch({name: EVERY_TYPE[name]})
    assert batch.columns[name].axis == EVERY_TYPE[name].axis
    stored = from_arrow(to_arrow(batch)).columns[name]
    assert repr(stored.values.tolist()) == repr(batch.columns[name].cast(EVERY_TYPE[name].dtype).values.tolist())


@given(
    st.sampled_from(sorted(EVERY_TYPE)), st.integers(1, 5), st.integers(1, 4) | st.lists(st.integers(0, 3), min_size=1),
    st.integers(0, 3), st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 9), st.booleans(),
)  # fmt: skip
def test_a_toy_batch_follows_from_its_arguments(
    name: str, num_prompts: int, group: Any, seed: int, lengths: list[int], nulls: int, masks: bool
) -> None:
    def make(types: dict[str, FieldType]) -> Batch:
        return toy_batch(
            types, num_prompts=num_prompts, group=group, seed=seed, lengths=lengths, nulls=nulls, masks=masks
        )

    one, more = make({name: EVERY_TYPE[name]}), make(EVERY_TYPE)
    assert one.rows.uids == more.rows.uids
    assert one.rows.num_groups == (num_prompts if isinstance(group, int) else len(group))
    if len(one.rows):  # a batch of prompts has no trajectories yet
        assert one.rows == more.rows
        assert repr(one.columns[name].values.tolist()) == repr(more.columns[name].values.tolist())


def test_without_a_field_of_samples_there_are_only_prompts() -> None:
    rows = toy_batch({"prompt": "Prompt[str]"}, group=4).rows
    assert (len(rows), rows.planned.tolist(), rows.settled.tolist()) == (0, [4, 5, 3], [0, 0, 0])


def test_a_type_that_is_none_is_refused() -> None:
    for wrong in ("Sample[double]", "Row[float]", "float"):
        with pytest.raises(ValueError, match="is no field type"):
            toy_batch({"x": wrong})


class Mix(Node):
    """Several lists and an optional."""

    scale: float = Field(1.0, ge=0)
    eager: bool = False

    class Out(NamedTuple):
        total: Sample[float]

    def needs(self) -> dict[str, bool]:
        return {"extra": self.eager}

    def run(self, rewards: list[Sample[float]], extra: Sample[float] | None = None) -> Out:
        total = sum(reward.values for reward in rewards) * self.scale
        return self.Out(Sample(rewards[0].rows, total) if extra is None else Sample(extra.rows, total + extra.values))


def test_a_node_runs_on_columns_by_port_on_a_toy_batch_or_on_both() -> None:
    rows = Rows.of(["A", "A"])
    rewards = [Sample(rows, [1.0, 2.0]), Sample(rows, [10.0, 20.0])]
    assert list(run_node(Mix(), rewards=rewards).total) == [11.0, 22.0]
    assert list(run_node(Mix(), rewards=rewards, extra=Sample(rows, [0.5, 0.5])).total) == [11.5, 22.5]
    batch = toy_batch(Mix(), num_fields=3, nulls=0)
    assert list(batch.columns) == ["rewards.0", "rewards.1", "rewards.2"]
    expected = sum(column.values for column in batch.columns.values())
    assert np.array_equal(run_node(Mix(), batch).total.values, expected)
    assert "extra" in toy_batch(Mix(eager=True)).columns
    zero = Sample(batch.rows, np.zeros(len(batch.rows)))
    assert np.array_equal(run_node(Mix(), batch, extra=zero).total.values, expected)


def test_a_missing_input_and_one_that_nobody_reads_are_named() -> None:
    with pytest.raises(TypeError, match=r"Mix.run reads 'rewards' \(Sample\[float\]\), which was not given"):
        run_node(Mix())
    with pytest.raises(TypeError, match=r"Mix\.run reads no 'reward'; it reads rewards, extra"):
        run_node(Mix(), reward=Sample(Rows.of(["A"]), [1.0]))


class Stream(Node):
    """Trajectories, a group at a time."""

    scope = "group"
    cardinality = "expands"

    class Out(NamedTuple):
        rows: Rows
        text: Sample[str]
        num: Step[int]

    def run(self, prompt: Prompt[str]) -> Iterator[Out]:
        for group, uid in enumerate(prompt.rows.uids):
            size = int(prompt.rows.planned[group])
            rows = Rows([uid], [0] * size, list(range(size)))
            metric("stream/rows", size, reduce="sum")
            yield self.Out(rows, Sample(rows, [f"{uid}!"] * size), Step(rows, 7))


def test_blocks_of_a_stream_become_one_out() -> None:
    with collect() as report:
        out = run_node(Stream(), toy_batch(Stream))
    assert isinstance(out, Stream.Out)
    assert out.rows == out.text.rows
    assert out.rows.names() == ["u2_0_0", "u2_1_0", "u5e1_0_0", "u5e1_1_0", "u5e1_2_0", "u8_0_0"]
    assert list(out.text) == ["u2!"] * 2 + ["u5e1!"] * 3 + ["u8!"]
    assert out.num.value == 7
    assert report.metrics["stream/rows"].value == 6


class NeedsSetup(Node):
    """Knows its worker."""

    class Out(NamedTuple):
        seed: Sample[int]

    def setup(self, context: Context) -> None:
        object.__setattr__(self, "_seed", context.seed)

    def run(self, reward: Sample[float], info: Sample[Json]) -> Out:
        return self.Out(Sample(reward.rows, [self._seed] * len(reward)))  # type: ignore[attr-defined]


def test_setup_comes_first_with_the_context_that_is_given() -> None:
    batch = toy_batch(NeedsSetup)
    assert set(run_node(NeedsSetup(), batch).seed) == {0}
    assert set(run_node(NeedsSetup(), batch, context=Context(seed=5)).seed) == {5}


def test_a_model_node_runs_with_the_shipped_model() -> None:
    logprob = find("model.logprob", ROOT).load()()
    out = run_node(logprob, toy_batch(logprob))
    assert (out.log_probs.values < 0).all()


def test_a_plan_is_asserted_by_levels_edges_and_fields() -> None:
    pipeline = flowrl.load(ROOT / "pipelines/grpo_sync.yaml")
    levels = [sorted(level) for level in pipeline.plan().graph.levels]
    assert_plan(pipeline, levels=levels)
    assert_plan(pipeline.plan(), levels=[reversed(level) for level in levels])
    edges = [f"{e.source} {'=>' if e.distance else '->'} {e.target}: {e.label}" for e in pipeline.plan().graph.edges]
    assert "weight_sync => rollout: policy" in edges
    assert_plan(ROOT / "pipelines/grpo_sync.yaml", edges=reversed(edges))
    fields = ["reward: Sample[float] by reward for advantage"]
    with pytest.raises(AssertionError, match="fields wanted") as caught:
        assert_plan(str(ROOT / "pipelines/grpo_sync.yaml"), fields=fields)
    lines = str(caught.value).splitlines()
    assert f" {fields[0]}" in lines
    assert "+answer: Prompt[str] by data for reward" in lines
    with pytest.raises(AssertionError, match="-nothing"):
        assert_plan(pipeline, levels=[*levels, ["nothing"]])
    with pytest.raises(flowrl.PipelineError):
        assert_plan(flowrl.Pipeline({}), levels=[])


MODULE = '''
from typing import NamedTuple
from pydantic import Field
from flowrl import Node, Sample, Token


class Mine(Node):
    """A node."""

    scale: float = Field(gt=0)
    how: str = "fine"

    class Out(NamedTuple):
        shaped: Sample[float]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        lengths = [len(row) for row in response_mask.jagged]
        if self.how == "bad":
            lengths = [1 / length for length in lengths]
        return self.Out(reward * self.scale + Sample(reward.rows, lengths))
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nodes_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["test-node", *arguments])
    return done.exit_code, done.output


@pytest.mark.parametrize("use", ["nodes_of_mine:Mine", "./nodes_of_mine.py:Mine"])
def test_the_command_prints_a_line_for_every_property(folder: Path, use: str) -> None:
    code, output = invoke(use)
    assert code == 0
    lines = output.splitlines()
    assert lines[0] == use
    assert lines[1] == "  scale=1.0 is the smallest allowed; --set scale=... for another"
    assert [line.split()[0] for line in lines[2:-1]] == ["ok"] * 8
    assert lines[-1] == "8 of 8 properties hold"


def test_the_command_says_what_fails_where_and_for_which_rows(folder: Path) -> None:
    code, output = invoke("./nodes_of_mine.py:Mine", "--set", "how=bad", "--set", "scale=2.0", "--seed", "3")
    assert code == 1
    assert output.splitlines()[0] == './nodes_of_mine.py:Mine how="bad" scale=2.0'
    assert "  FAILED  survives empty and short rows\n" in output
    assert "            with an empty response: ZeroDivisionError: division by zero\n" in output
    assert "            nodes_of_mine.py:19: lengths = [1 / length for length in lengths]\n" in output
    assert "            rows u2_1_0, u5e1_1_0, u8_0_0\n" in output
    assert output.endswith("7 of 8 properties hold\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("./nodes_of_mine.py:Mien",), "did you mean 'Mine'?"),
        (("./nodes_of_min.py:Mine",), "did you mean 'nodes_of_mine.py'?"),
        (("no_such_module:Mine",), "no module named 'no_such_module'"),
        (("reward.exact_mach",), "did you mean 'reward.exact_match'?"),
        (("./nodes_of_mine.py:Mine", "--set", "scael=1.0"), "did you mean 'scale'?"),
        (("./nodes_of_mine.py:Mine", "--set", "zz=1"), "--set:1:1  Mine has no parameter 'zz'"),
        (("./nodes_of_mine.py:Mine", "--set", "zz=1"), "fix: known: how, scale"),
        (("./nodes_of_mine.py:Mine", "--set", "model=policy"), "Mine has no parameter 'model'"),
        (("./nodes_of_mine.py:Mine", "--set", "zz.deep=1", "--set", "scale=0"), "2 errors"),
        (("sync.weights", "--set", "zz=1"), "'zz'"),
        (("./nodes_of_mine.py",), "its node classes: Mine"),
        ((":",), "':' names no class: write a library name"),
        (("./nodes_of_mine.py:Mine", "--set", "scale=0"), "scale must be above 0, not 0"),
        (("./nodes_of_mine.py:Mine", "--set", "scale"), "is not of the form key.of.value=value"),
    ],
)
def test_a_class_that_is_not_there_and_wrong_parameters_are_told(
    folder: Path, arguments: tuple[str, ...], said: str
) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert said in output


def test_a_sync_is_said_to_be_tested_elsewhere() -> None:
    code, output = invoke("sync.weights")
    assert code == 0
    assert "tested by a run of a pipeline" in output
