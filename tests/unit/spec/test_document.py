"""What the sections accept, and what is said of what they refuse."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jsonschema
import pytest

from flowrl.node import ENGINE_KEYS
from flowrl.spec.document import Document, NodeSpec
from flowrl.spec.dump import dump_resolved, dump_yaml
from flowrl.spec.load import load_text
from flowrl.spec.schema import SCHEMA_FILE, pipeline_schema, schema_text
from flowrl.spec.tree import Source, plain


def test_a_right_document_has_no_problems_and_its_defaults(read: Any) -> None:
    reading = read(read.good)
    assert reading.problems == ()
    document = reading.document
    assert document.models["policy"].optimizer.lr == 1e-6
    assert document.nodes["rollout"].params == {"temperature": 1.0}
    assert document.nodes["reward"].every == 1
    assert [tracker.type for tracker in document.tracking] == ["none"]
    assert document.checkpoint is None
    assert document.run.dir == "runs"


def test_engine_keys_are_the_same_for_documents_and_node_classes() -> None:
    assert frozenset(NodeSpec.model_fields) == ENGINE_KEYS


@pytest.mark.parametrize(
    ("before", "after", "code", "underlined", "fact", "fix"),
    [
        ("steps: 3", "steps: true", "FR006", "true", "run.steps must be a whole number, not true", "true is no number"),
        ("steps: 3", 'steps: "3"', "FR006", '"3"', "must be a whole number, not '3'", "write 3 without quotes"),
        ("steps: 3", "steps: 1_000", "FR006", "1_000", "must be a whole number", "write 1000"),
        ("steps: 3", "steps: 2.0", "FR006", "2.0", "must be a whole number, not 2.0", "write 2"),
        ("steps: 3", "steps: 2.5", "FR006", "2.5", "must be a whole number, not 2.5", "write a whole number"),
        ("steps: 3", "steps: .nan", "FR006", ".nan", "must be a whole number, not .nan", "write a whole number"),
        ("steps: 3", "steps: 0", "FR007", "0", "run.steps must be at least 1, not 0", ""),
        ("steps: 3", "steps: [3]", "FR006", "[3]", "must be a whole number, not a list", ""),
        ("steps: 3", "stesp: 3", "FR005", "stesp", "run has no key 'stesp'", "did you mean 'steps'?"),
        ("steps: 3", 'strict_io: "true"', "FR006", '"true"', "must be true or false", "write true without quotes"),
        ("steps: 3", "strict_io: yes", "FR006", "yes", "must be true or false, not 'yes'", "write true"),
        ("steps: 3", "dir: 3", "FR006", "3", "run.dir must be a string, not 3", 'write "3"'),
        ("{steps: 3}", "3", "FR006", "3", "run must be a mapping, not 3", ""),
        ("lr: 1e-6", "lr: 0", "FR007", "0", "models.policy.optimizer.lr must be above 0, not 0", ""),
        ("lr: 1e-6", "lr: -1", "FR007", "-1", "must be above 0, not -1", ""),
        ("lr: 1e-6", "lr: .nan", "FR007", ".nan", "must be a finite number, not .nan", ""),
        ("lr: 1e-6", "lr: .inf", "FR007", ".inf", "must be a finite number, not .inf", ""),
        ("lr: 1e-6", "lr: 1e999", "FR007", "1e999", "must be a finite number", ""),
        ("lr: 1e-6", 'lr: "1e-6"', "FR006", '"1e-6"', "must be a number", "write 1e-6 without quotes"),
        ("lr: 1e-6", "lr: high", "FR006", "high", "must be a number, not 'high'", ""),
        ("lr: 1e-6", "betas: [0.9]", "FR006", "betas", "models.policy.optimizer.betas is too short", ""),
        ("lr: 1e-6", 'betas: [0.9, "0.95"]', "FR006", '"0.95"', "betas[1] must be", "write 0.95 without quotes"),
        ("lr: 1e-6", "max_grad_norm: 0", "FR007", "0", "must be above 0", ""),
        ("trainable: true", "lr: 1", "FR005", "lr", "has no key 'lr'", "'lr' belongs in models.<name>.optimizer"),
        (
            "trainable: true, optimizer: {lr: 1e-6}",
            "trainable: true, dtype: float16",
            "FR007",
            "float16",
            "float16 is too narrow to train in",
            "dtype: float32",
        ),
        ("trainable: true", "dtype: float", "FR007", "float", "must be float32, bfloat16 or float16", "did you mean"),
        ("path: $base, ", "", "FR008", "policy", "models.policy lacks the key 'path'", "add `path: ...`"),
        ("type: arithmetic", "type: arithmetics", "FR011", "arithmetics", "data.train.type must be", "'arithmetic'"),
        ("type: arithmetic, ", "", "FR008", "train", "data.train lacks the key 'type'", "add"),
        ("size: 64", "siez: 64", "FR005", "siez", "data.train has no key 'siez'", "did you mean 'size'?"),
        ("size: 64", "low: 60", "FR007", "60", "low (60) must be below high (50)", ""),
        ("size: 64", "size: 3", "FR018", "3", "4 prompts are needed at once, but the data set has 3", "size: 4"),
        ("train: {type", "val: {type", "FR008", "data", "data lacks the key 'train'", "add `train: ...`"),
        ("prompts: 4, ", "", "FR008", "batch", "batch lacks the key 'prompts'", ""),
        ("{shares: train}", "{shares: train, workers: 2}", "FR007", "train", "shares", "shares: null"),
        ("{workers: 1}", "{workers: 0}", "FR007", "0", "pools.train.workers must be at least 1", ""),
        ("  train: {workers", "  a.b: {workers", "FR007", "a.b", "which 'a.b' does not", "letters"),
        ("{mode: sync}", "{mode: snyc}", "FR007", "snyc", "schedule.mode must be sync, colocate_async", "'sync'"),
        ("{mode: sync}", "{stale: wait}", "FR008", "schedule", "schedule lacks the key 'mode'", ""),
        ("{mode: sync}", "{mode: sync, stale: wait}", "FR072", "stale", "of mode colocate_async or", "remove `stale:`"),
        ("{mode: sync}", "{mode: sync, steps: 3}", "FR005", "steps", "no key 'steps'", "'steps' belongs in run"),
        ("{mode: sync}", "{mode: colocate_async, updates_per_sync: 2}", "FR072", "updates_per_sync", "separate", ""),
        ("use: reward.exact_match", "use: a.b, every: 0", "FR007", "0", "nodes.reward.every must be at least 1", ""),
        ("use: reward.exact_match", "use: a.b, on_error: dorp", "FR007", "dorp", "must be fail, drop,", "'drop'"),
        ("use: reward.exact_match", "use: a.b, reads: {p: 3}", "FR006", "3", "must be a string or a list", 'write "3"'),
        ("use: reward.exact_match", "use: a.b, reads: {p: [a, 3]}", "FR006", "3", "reads.p[1] must be a string", "'3'"),
        ("use: reward.exact_match", "use: a.b, tags: x", "FR006", "x", "must be a list", "write [x]"),
        ("use: reward.exact_match", "scale: 3", "FR008", "reward", "nodes.reward lacks the key 'use'", ""),
        ("flowrl: 1", "flowrl: 2", "FR007", "2", "flowrl must be at most 1", ""),
        ("flowrl: 1", "flowrl: 1.0", "FR006", "1.0", "flowrl must be a whole number", "write 1"),
        ("flowrl: 1", "flowrl: true", "FR006", "true", "flowrl must be a whole number", ""),
        ("name: small", "name: a/b", "FR007", "a/b", "name must match", ""),
        ("name: small", "name: small\nnodse: {}", "FR005", "nodse", "the document has no key 'nodse'", "'nodes'"),
        ("name: small", "name: small\nsteps: 3", "FR005", "steps", "no key 'steps'", "'steps' belongs in run"),
        ("name: small", "name: small\ncheckpoint: {evry: 3}", "FR005", "evry", "checkpoint has no key", "'every'"),
        ("name: small", "name: s\ntracking: {type: wand}", "FR007", "wand", "tensorboard, wandb or none", "'wandb'"),
        ("name: small", "name: s\ntracking: {type: wandb, mode: on}", "FR007", "on", "online, offline or disabled", ""),
        ("name: small", "name: s\ntracking: [{type: mlflow, url: x}]", "FR005", "url", "tracking[0] has no", "'uri'"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_words_where_it_stands(
    read: Any, before: str, after: str, code: str, underlined: str, fact: str, fix: str
) -> None:
    problem = read.problem(before, after)
    assert problem.code == code
    start = problem.place.column - 1
    assert problem.place.text[start : start + problem.place.length] == underlined
    assert fact in problem.fact
    assert fix in problem.fix.replace('"3"', "'3'" if fix == "'3'" else '"3"')


def test_missing_sections_are_told_at_the_file(read: Any) -> None:
    reading = read("run: {steps: 3}\n")
    assert {problem.fact for problem in reading.problems} == {
        f"the document lacks the key '{key}'" for key in ("flowrl", "name", "data", "batch", "nodes")
    }
    assert all(problem.place.text == "" for problem in reading.problems)


def test_many_mistakes_are_told_in_one_go_and_the_rest_stays_usable(read: Any) -> None:
    text = read.good.replace("lr: 1e-6", "lr: 0").replace("temperature: 1.0", "every: 0, temprature: 1.0")
    text = text.replace("prompts: 4", 'prompts: "4"').replace("steps: 3", "steps: 3, steps: 4")
    reading = read(text + "kl_coef: 3\n", "nonsense", "batch.group=true")
    assert sorted(problem.code for problem in reading.problems) == [
        "FR003", "FR005", "FR006", "FR006", "FR007", "FR007", "FR017",
    ]  # fmt: skip
    assert reading.document.nodes["rollout"].params == {"temprature": 1.0}
    assert reading.document.nodes["rollout"].every == 1
    assert reading.document.run.steps == 3
    assert reading.is_broken(("models", "policy", "optimizer", "lr"))
    assert not reading.is_broken(("models", "policy"))


def test_problems_follow_the_file_from_top_to_bottom(read: Any) -> None:
    reading = read(read.good.replace("name: small", "name: small\nx: 1").replace("steps: 3", "stps: 3, seed: true"))
    places = [(problem.place.line, problem.place.column) for problem in reading.problems]
    assert len(places) == 3
    assert places == sorted(places)


def test_what_a_refused_value_takes_with_it_is_marked_broken(read: Any) -> None:
    reading = read.changed("path: $base", "path: 3")
    assert [problem.code for problem in reading.problems] == ["FR006"]
    assert reading.document.models == {}
    assert reading.is_broken(("models", "policy"))


def test_without_data_or_batch_the_nodes_can_still_be_used(read: Any) -> None:
    text = read.good.replace("  train: {type: arithmetic, size: 64}\n", "  3\n").replace(
        "{prompts: 4, group: 2}", "none"
    )
    reading = read(text)
    assert [problem.code for problem in reading.problems] == ["FR006", "FR006"]
    assert set(reading.document.nodes) == {"rollout", "reward"}
    assert reading.is_broken(("data", "train"))
    assert reading.is_broken(("batch", "prompts"))


def test_a_document_whose_nodes_are_all_wrong_is_not_usable(read: Any) -> None:
    reading = read(read.good[: read.good.index("nodes:")] + "nodes: {a: 3, b: x}\n")
    assert [problem.code for problem in reading.problems] == ["FR006", "FR006"]
    assert reading.document is None


def test_the_resolved_document_prints_every_default_and_reads_back_equal(read: Any) -> None:
    extra = "tracking: {type: mlflow}\ncheckpoint: {}\n"
    document = read(read.good.replace("{mode: sync}", "{mode: separate_async}") + extra).document
    text = dump_resolved(document)
    for setting in ("max_staleness: 1", "betas: [0.9, 0.999]", "strict_io: false", "keep: 2", "every: 1", "uri: null"):
        assert setting in text
    assert "$" not in text
    again = read(text)
    assert again.problems == ()
    assert again.document == document
    assert dump_resolved(again.document) == text


@pytest.mark.parametrize(
    "value",
    ["1e-6", "off", "null", "", "2024-01-01", "<<", "a: b", "- x", "#c", "é😀", "a\nb\n", " x ", "'", "\t", "3_0", "=",
     "&a", "x" * 300, 1e-6, 1e22, -0.0, 10**30, True, None, [], {}, [[1, [2]], {"a": {}}], {"1": {"b": [None]}}],
)  # fmt: skip
def test_any_value_is_written_so_that_it_reads_back(value: Any) -> None:
    text = dump_yaml({"a": value})
    tree, problems = load_text(text, Source("f", text.splitlines()))
    assert not problems
    assert tree is not None
    assert plain(tree) == {"a": value}
    assert type(plain(tree)["a"]) is type(value)


def test_the_committed_schema_is_current() -> None:
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), (
        "write flowrl.spec.schema.schema_text() to the file"
    )


def test_the_schema_accepts_right_files_and_refuses_wrong_ones(read: Any) -> None:
    schema = jsonschema.Draft202012Validator(pipeline_schema())

    def accepts(text: str) -> bool:
        tree = load_text(text, Source("f")).tree
        assert tree is not None
        return bool(schema.is_valid(plain(tree)))

    assert accepts(read.good)
    assert accepts(
        "extends: a.yaml\nnodes: {reward: null, rollout: {temperature: $t}}\npools: {generate: {shares: null}}"
    )
    assert not accepts("name: x")
    for before, after in [
        ("steps: 3", "stesp: 3"),
        ("steps: 3", 'steps: "3"'),
        ("lr: 1e-6", "lr: 0"),
        ("sync", "snyc"),
    ]:
        assert not accepts(read.good.replace(before, after))


def test_settings_are_described_for_editors() -> None:
    properties = pipeline_schema()["$defs"]["NodeSpec"]["properties"]
    assert all(setting.get("description") for setting in properties.values())


def test_nodes_take_parameters_beside_engine_keys() -> None:
    node = NodeSpec(use="a.b", every=2, kl_coef=0.1, params={"x": 1})
    assert node.params == {"kl_coef": 0.1, "params": {"x": 1}}
    assert NodeSpec.model_validate(node.model_dump()) == node


def test_models_name_their_fields_in_full() -> None:
    assert set(Document.model_fields) == {
        "flowrl", "name", "params", "models", "data", "batch", "pools", "nodes", "schedule", "run", "tracking",
        "checkpoint",
    }  # fmt: skip


def test_reading_needs_neither_torch_nor_ray_nor_arrow() -> None:
    heavy = ("torch", "ray", "pyarrow", "networkx", "mlflow", "transformers", "numpy")
    code = f"import sys, flowrl.spec.read, flowrl.spec.dump; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("before", "after", "code", "path", "fix"),
    [
        ("{use: reward.exact_match}", "{us: reward.exact_match}", "FR005", "nodes.reward.us", "did you mean 'use'?"),
        ("name: small", "name: -x", "FR007", "name", "begin with a letter, a digit or _, and go on with"),
        ("  reward:", "  1a:", "FR007", "nodes.1a", "begin with a letter or _, and go on with"),
        ("{steps: 3}", "{STEPS: 3}", "FR005", "run.STEPS", "did you mean 'steps'?"),
        ("group: 2}", "group: 2, steps: 3}", "FR005", "batch.steps", "'steps' belongs in run"),
        ("steps: 3", f"seed: {2**63}", "FR007", "run.seed", f"write {2**63 - 1} or less"),
        ("size: 64", f"seed: {10**400}", "FR007", "data.train.seed", f"write {2**63 - 1} or less"),
        ("size: 64", "size: 3", "FR018", "data.train.size", "write size: 4 or more, or lower batch.prompts"),
    ],
)
def test_the_fix_fits_the_mistake(read: Any, before: str, after: str, code: str, path: str, fix: str) -> None:
    problem = read.problem(before, after)
    assert (problem.code, problem.place.path) == (code, path)
    assert problem.fix.startswith(fix)


@pytest.mark.parametrize(
    ("schedule", "lower"),
    [
        ("max_in_flight: 70", "schedule.max_in_flight, and with it batch.prompts"),
        ("warmup_batches: 20, max_staleness: 30", "batch.prompts or schedule.warmup_batches"),
        ("warmup_batches: 30, max_staleness: 20", "batch.prompts or schedule.max_staleness"),
    ],
)
def test_too_few_rows_name_what_decides(read: Any, schedule: str, lower: str) -> None:
    problem = read.problem("{mode: sync}", f"{{mode: separate_async, {schedule}}}")
    assert problem.code == "FR018" and problem.fix.endswith(f"or lower {lower}")


@pytest.mark.parametrize("number", ["9" * 4000, "0x" + "f" * 3500, "-" + "9" * 4000, "0o" + "7" * 4000])
def test_no_number_is_too_long_to_be_told(read: Any, number: str) -> None:
    problem = read.problem("group: 2", f"group: [{number}, {number}]")
    assert problem.code == "FR006"
    problem = read.problem("steps: 3", f"seed: {number}")
    assert problem.code == "FR007" and len(problem.fact) < 200
