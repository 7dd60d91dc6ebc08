"""`extends`, `--set` and `$params`, and the positions that survive them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.spec.document import BatchSpec
from flowrl.spec.read import read_document, read_value


def test_an_extending_file_merges_mappings_and_replaces_the_rest(read: Any) -> None:
    read.file("base.yaml", read.good)
    reading = read("extends: base.yaml\nname: child\nnodes: {rollout: {temperature: 0.7}}\nbatch: {group: 4}\n")
    assert reading.problems == ()
    assert reading.document.name == "child"
    assert reading.document.nodes["rollout"].params == {"temperature": 0.7}
    assert reading.document.nodes["rollout"].model == "policy"
    assert (reading.document.batch.prompts, reading.document.batch.group) == (4, 4)


def test_null_removes_and_the_class_default_applies(read: Any) -> None:
    read.file("base.yaml", read.good)
    reading = read(
        "extends: base.yaml\nrun: {steps: null}\npools: {generate: {shares: null, workers: 2}}\nnodes: {reward: }"
    )
    assert reading.problems == ()
    assert reading.document.run.steps == 100
    assert reading.document.pools["generate"].shares is None
    assert set(reading.document.nodes) == {"rollout"}


def test_null_in_a_base_file_means_left_out(read: Any) -> None:
    reading = read(read.good + "tracking:\ncheckpoint: ~\n")
    assert reading.problems == ()
    assert "tracking" not in reading.resolved


def test_a_mapping_whose_kind_changes_is_replaced_whole(read: Any) -> None:
    reading = read.changed("{mode: sync}", "{mode: colocate_async, stale: wait}", "schedule.mode=separate_async")
    assert reading.resolved["schedule"] == {"mode": "separate_async"}
    reading = read(read.good, "nodes.rollout.use=rollout.other", "nodes.rollout.model=policy")
    assert reading.resolved["nodes"]["rollout"] == {"use": "rollout.other", "model": "policy"}


def test_the_same_kind_again_changes_nothing_else(read: Any) -> None:
    reading = read(read.good, "data.train={type: arithmetic, seed: 3}")
    assert reading.resolved["data"]["train"] == {"type": "arithmetic", "size": 64, "seed": 3}


def test_a_node_parameter_called_mode_does_not_change_the_kind_of_node(read: Any) -> None:
    reading = read.changed("temperature: 1.0", "mode: a, n: 3", "nodes.rollout.mode=b")
    assert reading.document.nodes["rollout"].params == {"mode": "b", "n": 3}


def test_params_may_be_called_type(read: Any) -> None:
    reading = read.changed("{base: arith-tiny}", "{base: arith-tiny, type: a}", "params.type=b")
    assert reading.problems == ()
    assert reading.document.params == {"base": "arith-tiny", "type": "b"}


def test_chains_merge_from_the_far_end_and_paths_start_at_each_file(read: Any, tmp_path: Path) -> None:
    read.file("deep/base.yaml", read.good)
    read.file("deep/middle.yaml", "extends: base.yaml\nrun: {steps: 5, seed: 1}\nbatch: {group: 3}")
    reading = read("extends: deep/middle.yaml\nrun: {steps: 6}", "run.seed=9")
    assert reading.problems == ()
    assert (reading.document.run.steps, reading.document.run.seed, reading.document.batch.group) == (6, 9, 3)
    assert reading.place(("batch", "group")).file == str(tmp_path / "deep/middle.yaml")
    assert reading.place(("batch", "prompts")).file == str(tmp_path / "deep/base.yaml")
    assert reading.place(("run", "seed")).file == "--set"


def test_a_problem_in_a_parent_points_into_the_parent(read: Any, tmp_path: Path) -> None:
    read.file("base.yaml", read.good.replace("steps: 3", 'steps: "3"'))
    (problem,) = read("extends: base.yaml\nname: child").problems
    assert problem.place.file == str(tmp_path / "base.yaml")
    assert problem.place.line == 16
    assert "run: {steps" in problem.place.text


def test_a_missing_base_is_one_problem_with_the_nearest_name(read: Any) -> None:
    read.file("grpo_sync.yaml", read.good)
    reading = read("extends: grpo_snyc.yaml\nnmae: x\nrun: {steps: 0}")
    assert [problem.code for problem in reading.problems] == ["FR016", "FR005", "FR007"]
    assert reading.problems[0].fix == "did you mean 'grpo_sync.yaml'?"
    assert reading.problems[0].place.line == 1
    assert reading.document is None


def test_files_that_extend_in_a_circle_are_named_in_order(read: Any, tmp_path: Path) -> None:
    read.file("a.yaml", "extends: b.yaml\n")
    reading = read.file("b.yaml", "extends: a.yaml\n")
    (problem,) = reading.problems
    assert problem.code == "FR016"
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    assert f"{b} extends {a} extends {b}" in problem.fact
    (itself,) = read("extends: p.yaml").problems
    assert itself.code == "FR016"


def test_a_broken_base_is_reported_in_the_base(read: Any, tmp_path: Path) -> None:
    read.file("base.yaml", "a: [1\n")
    reading = read("extends: base.yaml\nname: child")
    assert [problem.code for problem in reading.problems] == ["FR002"]
    assert reading.problems[0].place.file == str(tmp_path / "base.yaml")


@pytest.mark.parametrize("value", ["3", "[a.yaml, b.yaml]", "{a: b}"])
def test_extends_takes_one_file_name(read: Any, value: str) -> None:
    (problem,) = read(f"extends: {value}\nname: x").problems
    assert problem.code == "FR016"
    assert "extends must be" in problem.fact


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("batch.group=16", ("batch", "group"), 16),
        ("models.policy.optimizer.lr=1e-6", ("models", "policy", "optimizer", "lr"), 1e-6),
        ("nodes.reward.tags=[a, b]", ("nodes", "reward", "tags"), ["a", "b"]),
        ("nodes.reward.x={y: 1}", ("nodes", "reward", "x"), {"y": 1}),
        ("nodes.reward.text='a=b: c'", ("nodes", "reward", "text"), "a=b: c"),
        ("nodes.reward.q=off", ("nodes", "reward", "q"), "off"),
        ("checkpoint.every=5", ("checkpoint", "every"), 5),
        ("nodes.reward.equation=x=y", ("nodes", "reward", "equation"), "x=y"),
        ("models.policy.path=$base", ("models", "policy", "path"), "arith-tiny"),
    ],
)
def test_set_takes_values_in_yaml(read: Any, argument: str, path: tuple[str, ...], value: Any) -> None:
    reading = read(read.good, argument)
    assert reading.problems == ()
    found = reading.resolved
    for part in path:
        found = found[part]
    assert found == value


def test_the_last_of_two_sets_wins_and_null_removes(read: Any) -> None:
    reading = read(read.good, "run.steps=5", "run.steps=7", "nodes.reward=null", "pools.generate={shares: null}")
    assert reading.document.run.steps == 7
    assert set(reading.document.nodes) == {"rollout"}
    assert reading.document.pools["generate"].shares is None


def test_a_value_of_set_is_underlined_in_the_argument(read: Any) -> None:
    (problem,) = read(read.good, "batch.group=true").problems
    assert problem.render() == (
        "error[FR006] --set:1:13  batch.group must be a whole number, not true\n"
        "    1 | batch.group=true\n"
        "      |             ^^^^\n"
        "   fix: true is no number: write a number"
    )
    (unknown,) = read(read.good, "run.stesp=3").problems
    assert (unknown.code, unknown.place.column, unknown.place.length) == ("FR005", 5, 5)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("run.steps=", "gives no value"),
        ("novalue", "not of the form"),
        ("=3", "not of the form"),
        ("a..b=3", "not of the form"),
        ("", "not of the form"),
        ("run.steps=[1", "cannot be read"),
        ("run.dir=a: b: c", "cannot be read"),
        ("run.seed=2024-01-01", "cannot be read"),
        ("run.dir=\udcff", "U+DCFF"),
        ("run.steps.more=1", "run.steps is 3, not a mapping"),
        ("models.policy.path.x=1", "models.policy.path is '$base', not a mapping"),
    ],
)
def test_a_bad_set_is_a_problem_and_the_file_still_counts(read: Any, argument: str, words: str) -> None:
    reading = read(read.good, argument)
    (problem,) = reading.problems
    assert problem.code == "FR017"
    assert problem.place.file == "--set"
    assert words in problem.fact
    assert reading.document.run.steps == 3


def test_a_set_cannot_go_through_a_list_nor_through_another_set(read: Any) -> None:
    (problem,) = read(read.good + "tracking: [{type: none}]\n", "tracking.type=none").problems
    assert "tracking is a list" in problem.fact
    (problem,) = read(read.good, "nodes.reward.x=1", "nodes.reward.x.y=2").problems
    assert problem.code == "FR017"


def test_only_whole_values_are_params(read: Any) -> None:
    text = read.good.replace("{base: arith-tiny}", "{base: arith-tiny, n: 5, sub: {a: [1]}}")
    reading = read(text, "nodes.reward={n: $n, s: $sub, l: [$n, x], cost: cost $5, five: $5, dollar: $, two: $n$n}")
    assert reading.problems == ()
    expected = {"n": 5, "s": {"a": [1]}, "l": [5, "x"], "cost": "cost $5", "five": "$5", "dollar": "$", "two": "$n$n"}
    assert reading.document.nodes["reward"].params == expected


def test_a_wrong_value_of_a_param_is_shown_where_it_is_written(read: Any) -> None:
    problem = read.problem("{base: arith-tiny}", "{base: 3}")
    assert (problem.code, problem.place.line, problem.place.path) == ("FR006", 3, "models.policy.path")


def test_an_unknown_param_is_one_problem_with_the_nearest_name(read: Any) -> None:
    problem = read.problem("path: $base", "path: $bsae")
    assert problem.code == "FR015"
    assert problem.fix == "did you mean 'base'?"
    assert read.problem("{base: arith-tiny}", "{}").fix == "add it: params: {base: ...}"


def test_params_cannot_refer_to_params(read: Any) -> None:
    problem = read.problem("{base: arith-tiny}", "{base: arith-tiny, other: {a: [$base]}}")
    assert (problem.code, problem.place.path) == ("FR015", "params.other.a[0]")


def test_params_of_the_wrong_type_are_one_problem(read: Any) -> None:
    problem = read.problem("{base: arith-tiny}", "[base]")
    assert (problem.code, problem.place.path) == ("FR006", "params")


def test_relative_files_start_at_the_file_that_names_them(read: Any, tmp_path: Path) -> None:
    text = read.good.replace("{type: arithmetic, size: 64}", "{type: jsonl, path: d.jsonl}").replace(
        "use: reward.exact_match", "use: my_nodes.py:Mine"
    )
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/d.jsonl").write_text('{"prompt": "x"}\n' * 4)
    read.file("deep/base.yaml", text)
    reading = read("extends: deep/base.yaml", "models.policy.path=./model")
    assert reading.problems == ()
    assert reading.document.data["train"].path == str(tmp_path / "deep/d.jsonl")
    assert reading.document.nodes["reward"].use == f"{tmp_path}/deep/my_nodes.py:Mine"
    assert reading.document.models["policy"].path == str(Path.cwd() / "model"), "--set starts at the working directory"
    assert reading.folder(("nodes", "reward", "use")) == tmp_path / "deep"


def test_a_document_made_in_python_is_read_alike() -> None:
    data = {
        "flowrl": 1, "name": "x", "params": {"b": "arith-tiny"}, "models": {"m": {"path": "$b"}},
        "data": {"train": {"type": "arithmetic"}}, "batch": {"prompts": 2, "group": 2},
        "nodes": {"a": {"use": "reward.x", "every": True, "tags": ("t",)}}, 3: 4,
    }  # fmt: skip
    reading = read_value(data, ["run.steps=2"])
    assert [(problem.code, str(problem.place)) for problem in reading.problems] == [
        ("FR004", "<python>:1:1"),
        ("FR006", "<python>:1:1"),
    ]
    assert reading.problems[1].place.path == "nodes.a.every"
    assert reading.document is not None
    assert reading.document.models["m"].path == "arith-tiny"
    assert reading.document.run.steps == 2
    assert reading.document.nodes["a"].tags == ["t"]


def test_params_may_have_dashes(read: Any) -> None:
    text = read.good.replace("{base: arith-tiny}", "{my-base: arith-tiny}").replace("$base", "$my-base")
    assert read(text).document.models["policy"].path == "arith-tiny"


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("'${base}'", "write $base"),
        ("'${bsae}'", "did you mean 'base'?"),
        ("$1x", "known: base"),
        ("$base.path", "did you mean 'base'?"),
        ("$größe", "known: base"),
    ],
)
def test_what_only_looks_like_a_reference_is_a_problem(read: Any, value: str, fix: str) -> None:
    problem = read.problem("path: $base", f"path: {value}")
    assert (problem.code, problem.place.path, problem.fix) == ("FR015", "models.policy.path", fix)


@pytest.mark.parametrize("value", ["$5", "$5.00", "$", "$a$b", "cost $x", "a $ b"])
def test_other_dollars_stay(read: Any, value: str) -> None:
    assert read.changed("path: $base", f"path: {value}").document.models["policy"].path == value


def test_values_that_do_not_go_together_are_shown_where_the_last_of_them_was_written(read: Any) -> None:
    read.file("base.yaml", read.good)
    over = read("extends: base.yaml\npools: {generate: {workers: 2}}\n")
    assert [str(problem.place).rpartition("/")[2] for problem in over.problems] == ["p.yaml:2:29"]
    reading = read("extends: base.yaml\n", "pools.generate.workers=2")
    assert [str(problem.place) for problem in reading.problems] == ["--set:1:24"]
    both = read("extends: base.yaml\npools: {generate: {workers: 2, shares: train}}\n")
    assert [problem.place.path for problem in both.problems] == ["pools.generate.shares"]


def test_a_misspelt_extends_is_the_only_problem(read: Any) -> None:
    read.file("base.yaml", read.good)
    (problem,) = read("extend: base.yaml\nrun: {steps: 2}\n").problems
    assert (problem.code, problem.fix) == ("FR005", "did you mean 'extends'?")


def test_extends_cannot_be_set(read: Any) -> None:
    (problem,) = read(read.good, "extends=x.yaml").problems
    assert (problem.code, problem.place.path) == ("FR017", "extends")


def test_a_folder_hides_no_shipped_pipeline_and_is_never_suggested(
    read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "grpo_sync").mkdir()
    (tmp_path / "basis.yaml").mkdir()
    assert read("extends: grpo_sync\n").problems == ()
    monkeypatch.chdir(tmp_path)
    assert read_document("grpo_sync").problems == ()
    (problem,) = read("extends: basi.yaml\n").problems
    assert "basis" not in problem.fix
    (problem,) = read("extends: grpo_sync.yaml\n").problems
    assert problem.fix == "did you mean 'grpo_sync'?"


class _Word(StrEnum):
    one = "one"


def test_values_of_python_that_yaml_has_a_form_for_are_taken() -> None:
    data = {"extends": "grpo_sync", "name": _Word.one, "run": {"dir": Path("a/b"), "steps": np.int64(3)}}
    reading = read_value({**data, "batch": BatchSpec(prompts=32, group=np.int64(4).item())})
    assert reading.problems == () and reading.document is not None
    run = reading.document.run
    assert (reading.document.name, run.dir, run.steps, type(run.steps)) == ("one", "a/b", 3, int)


NO_YAML = [object(), {1, 2}, b"x", np.zeros(2), range(3), 10**6000, float, lambda: 1]


@pytest.mark.parametrize("value", NO_YAML, ids=lambda value: type(value).__name__)
def test_other_values_of_python_are_problems(value: Any) -> None:
    (problem,) = read_value({"extends": "grpo_sync", "run": {"steps": value}}).problems
    assert (problem.code, problem.place.path) == ("FR004", "run.steps")
    assert "no form" in problem.fact


def test_a_value_of_python_that_holds_itself_or_is_very_deep_is_a_problem() -> None:
    endless: dict[str, Any] = {"flowrl": 1}
    endless["params"] = endless
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (endless, {"params": {"deep": deep}}):
        assert [problem.code for problem in read_value(value).problems] == ["FR004"]
