"""Blocks and fields put together by identity."""

from __future__ import annotations

from typing import Any

import numpy as np

from flowrl.batch import Batch, Column, Prompt, PromptToken, Sample, Step, Token
from flowrl.fields import FieldType
from flowrl.join import canonical, concat, join, project, singles, take, take_groups, with_groups
from flowrl.rows import Rows

SCORE, MASK = FieldType("Sample", "float"), FieldType("Token", "int")


def batch(rows: Rows, **columns: Column[Any]) -> Batch:
    dtypes = {"f": "float", "i": "int", "u": "int", "b": "bool", "O": "str"}
    types = {n: FieldType(c.axis, dtypes[c.values.dtype.kind]) for n, c in columns.items()}  # type: ignore[arg-type]
    return Batch(rows, columns, types)


def scored(uids: list[str], values: list[float], name: str = "score", session: list[int] | None = None) -> Batch:
    rows = Rows.of(uids, session)
    return batch(rows, **{name: Sample(rows, np.array(values, dtype=np.float32))})


def by_name(column: Column[Any]) -> dict[str, Any]:
    return dict(zip(column.rows.names(), column.values.tolist(), strict=True))


def test_fields_meet_by_identity_whatever_their_order() -> None:
    joined = join([scored(["a", "b"], [1, 2]), scored(["b", "a"], [20, 10], "other")])
    assert by_name(joined.columns["score"]) == {"a_0_0": 1, "b_0_0": 2}
    assert by_name(joined.columns["other"]) == {"a_0_0": 10, "b_0_0": 20}
    assert joined.columns["score"].rows == joined.columns["other"].rows == joined.rows


def test_blocks_of_one_writer_are_concatenated_first() -> None:
    joined = join([scored(["b"], [2]), scored(["a", "b"], [10, 20], "other"), scored(["a"], [1])])
    assert by_name(joined.columns["score"]) == {"a_0_0": 1, "b_0_0": 2}
    assert by_name(joined.columns["other"]) == {"a_0_0": 10, "b_0_0": 20}


def test_a_trajectory_that_one_part_lacks_is_left_out_of_all() -> None:
    joined = join([scored(["a", "a", "b"], [1, 2, 3]), scored(["a", "b"], [5, 6], "other", session=[1, 0])])
    assert by_name(joined.columns["score"]) == {"a_1_0": 2, "b_0_0": 3}
    assert by_name(joined.columns["other"]) == {"a_1_0": 5, "b_0_0": 6}


def test_prompts_never_remove_a_trajectory_and_come_one_row_a_group() -> None:
    prompts = Rows(["c", "b", "a"], planned=[2, 2, 2], settled=[0, 0, 0])
    joined = join([batch(prompts, answer=Prompt(prompts, ["C", "B", "A"])), scored(["a", "b", "a"], [1, 2, 3])])
    assert joined.rows.names() == ["a_0_0", "b_0_0", "a_1_0"]
    assert list(joined.columns["answer"]) == ["A", "B"]
    assert joined.types.keys() == {"answer", "score"}


def test_a_group_without_a_prompt_value_is_left_out() -> None:
    prompts = Rows(["b"])
    joined = join([scored(["a", "b", "a"], [1, 2, 3]), batch(prompts, keep=Prompt(prompts, ["yes"]))])
    assert joined.rows.names() == ["b_0_0"]
    assert by_name(joined.columns["score"]) == {"b_0_0": 2}
    steps = Rows.of(["b"])
    assert len(join([scored(["a", "b"], [1, 2]), batch(steps, t=Step(steps, 0.5))]).rows) == 2, "a step has one value"


def test_prompts_alone_can_be_joined() -> None:
    one, two = Rows(["a", "b"]), Rows(["b", "a"])
    joined = join([batch(one, x=Prompt(one, ["A", "B"])), batch(two, y=Prompt(two, ["b", "a"]))])
    assert (list(joined.columns["x"]), list(joined.columns["y"])) == (["A", "B"], ["a", "b"])


def test_a_step_value_is_the_same_for_all_blocks() -> None:
    one, two = Rows.of(["a"]), Rows.of(["b"])
    parts = [batch(rows, t=Step(rows, np.float32(0.7)), s=Sample(rows, [1.0])) for rows in (one, two)]
    joined = concat(parts)
    assert joined.columns["t"].values.dtype == np.float32
    assert joined.columns["t"].values.tolist() == [float(np.float32(0.7))]


def test_shared_prompts_are_found_again_after_take_and_concat() -> None:
    rows = Rows.of(["a", "b", "a"])
    whole = batch(rows, ids=PromptToken[int].of(rows, [[1, 2], [3]]))
    taken = take(whole, np.array([1]))
    assert taken.columns["ids"].values.tolist() == [3]
    again = concat([taken, take(whole, np.array([2, 0]))]).columns["ids"]
    assert isinstance(again, PromptToken)
    assert [row.tolist() for row in again.jagged] == [[3], [1, 2], [1, 2]]


def test_lists_of_equal_length_stay_single_values_in_a_group_column() -> None:
    one, two = Rows(["a"]), Rows(["b"])
    parts = [batch(rows, x=Prompt[Any](rows, [value])) for rows, value in ((one, [1, 2]), (two, [3, 4]))]
    assert list(concat(parts).columns["x"]) == [[1, 2], [3, 4]]


def test_take_groups_leaves_out_groups_that_the_batch_lacks() -> None:
    whole = scored(["a", "b", "a"], [1, 2, 3])
    assert by_name(take_groups(whole, ["a", "z"]).columns["score"]) == {"a_0_0": 1, "a_1_0": 3}
    assert take_groups(whole, ["b", "a", "z"]) is whole


def test_canonical_sorts_groups_and_rows_and_keeps_empty_groups() -> None:
    rows = Rows(["c", "b", "a"], [0, 2, 0], [1, 0, 0], planned=[2, 2, 1], settled=[2, 2, 1])
    found = canonical(batch(rows, s=Sample(rows, [1.0, 2.0, 3.0]), p=Prompt(rows, ["C", "B", "A"])))
    assert found.rows.uids == ("a", "b", "c")
    assert found.rows.planned.tolist() == [1, 2, 2]
    assert by_name(found.columns["s"]) == {"a_0_0": 2.0, "c_0_0": 3.0, "c_1_0": 1.0}
    assert found.rows.names() == ["a_0_0", "c_0_0", "c_1_0"]
    assert list(found.columns["p"]) == ["A", "B", "C"]


def test_canonical_sorts_prompts_that_have_no_trajectories_yet() -> None:
    rows = Rows(["b", "a"])
    assert list(canonical(batch(rows, p=Prompt(rows, ["B", "A"]))).columns["p"]) == ["A", "B"]


def test_project_keeps_the_named_fields_that_are_there() -> None:
    rows = Rows.of(["a"])
    whole = batch(rows, x=Sample(rows, [1.0]), y=Token.of(rows, [[1]]))
    assert project(whole, ["y", "z"]).columns.keys() == {"y"}


def test_singles_are_what_take_gives_for_each_row() -> None:
    rows = Rows.of(["B", "A", "B"])
    batch = Batch(
        rows,
        {
            "reward": Sample(rows, [1.0, 2.0, 3.0]),
            "answer": Prompt(rows, ["b", "a"]),
            "ids": Token.of(rows, [[1], [], [2, 3]], "int"),
        },
        {},
    )
    for position, single in enumerate(singles(batch)):
        taken = take(batch, np.array([position]))
        assert single.rows == taken.rows
        for name, column in single.columns.items():
            assert column.values.tolist() == taken.columns[name].values.tolist()


def test_groups_without_trajectories_are_added_with_their_prompts() -> None:
    rows = Rows(["b"], [0, 0], [0, 2], planned=[3], settled=[3])
    batch = Batch(
        rows, {"x": Sample(rows, [1.0, 2.0]), "p": Prompt(rows, ["B"])},
        {"x": FieldType("Sample", "float"), "p": FieldType("Prompt", "str")},
    )  # fmt: skip
    every = Rows(["a", "b", "c"])
    parts = [batch, Batch(every, {"p": Prompt(every, ["A", "B", "C"])}, {"p": FieldType("Prompt", "str")})]
    found = canonical(with_groups(batch, parts, ["a", "b", "c", "lost"], 3))
    assert found.rows.uids == ("a", "b", "c")
    assert found.rows.names() == ["b_0_0", "b_2_0"]
    assert found.rows.planned.tolist() == [3, 3, 3]
    assert list(found.columns["p"]) == ["A", "B", "C"]
    assert list(found.columns["x"]) == [1.0, 2.0]


def test_without_a_column_of_prompts_every_group_is_added() -> None:
    rows = Rows(["b"], [0], [0])
    batch = Batch(rows, {"x": Sample(rows, [1.0])}, {"x": FieldType("Sample", "float")})
    assert with_groups(batch, [batch], ["a", "b"], 2).rows.uids == ("b", "a")
