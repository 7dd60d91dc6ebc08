"""What one mistake, or any, in a shipped pipeline leads to: its own code and no other, and never an exception."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import PipelineError
from flowrl.graph.show.picture import PictureError
from flowrl.pipeline import VIEWS, Pipeline, load
from flowrl.spec.load import load_text
from flowrl.spec.tree import Source, plain

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "pipelines" / "grpo_sync.yaml"
TEXT = DEFAULT.read_text()

# One mistake, one code.

MISTAKES = [
    ("use: rollout.generate", "use: rollout.genrate", "FR009"),
    ("use: reward.exact_match", "use: reward.exact_mach", "FR009"),
    ("use: model.logprob, model: policy", "use: model.logprb, model: policy", "FR009"),
    ("use: advantage.grpo", "use: advantage.gpro", "FR009"),
    ("use: update.policy", "use: update.polcy", "FR009"),
    ("use: sync.weights", "use: sync.weight", "FR009"),
    ("use: sync.weights", "use: ./nowhere.py:Weights", "FR009"),
    ("writes: {log_probs: old_log_probs}", "writes: {log_prob: old_log_probs}", "FR013"),
    ("writes: {log_probs: old_log_probs}", "write: {log_probs: old_log_probs}", "FR005"),
    ("writes: {log_probs: old_log_probs}", "writes: {log_probs: 3}", "FR006"),
    ("writes: {log_probs: old_log_probs}", "writes: [old_log_probs]", "FR006"),
    ("writes: {log_probs: old_log_probs}", "writes: {log_probs: old_logprobs}", "FR026"),
    ("writes: {log_probs: ref_log_probs}", "writes: {log_probs: ref_logprobs}", "FR020"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, writes: {reward: score}}", "FR020"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, writes: {rewrd: score}}", "FR013"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, reads: {respnse: response}}", "FR013"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, reads: {response: respnse}}", "FR020"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, reads: {response: response_mask}}", "FR022"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, model: policy}", "FR019"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, strip: 1}", "FR006"),
    ("{use: reward.exact_match}", '{use: reward.exact_match, writes: {reward: ""}}', "FR007"),
    ("{use: reward.exact_match}", '{use: reward.exact_match, reads: {response: ""}}', "FR007"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, writes: {reward: advantages}}", "FR021"),
    ("{use: reward.exact_match}", "{use: reward.exact_match, ignore_cas: true}", "FR005"),
    ("{use: advantage.grpo}", "{use: advantage.grpo, writes: {advantages: advantage}}", "FR020"),
    ("  reference: {path: $base}\n", "", "FR010"),
    ("  policy:    {path: $base, trainable: true, optimizer: {lr: 3.0e-4}}\n", "", "FR010 FR010 FR010 FR010"),
    ("  generate: {shares: train}\n", "", "FR012"),
    ("  train:    {workers: 1}\n", "", "FR012 FR012 FR012 FR012"),
    ("{workers: 1}", "[1]", "FR006"),
    ("{shares: train}", "{shares: trian}", "FR012"),
    ("{shares: train}", "{shares: generate}", "FR012"),
    ("trainable: true, ", "", "FR024"),
    ("trainable: true", "trainable: yes", "FR006"),
    ("lr: 3.0e-4", "lr: three", "FR006"),
    ("lr: 3.0e-4", "lr: -1.0", "FR007"),
    ("max_tokens: 8, ", "", "FR008"),
    ("max_tokens: 8", "max_tokens: eight", "FR006"),
    ("max_tokens: 8", "max_token: 8", "FR005"),
    ("minibatch: 16", "minibatch: 17", "FR060"),
    ("minibatch: 16", "minibatch: '16'", "FR006"),
    ("minibatch: 16", "minibatch: 16, reads: {rollout_log_probs: rollot_log_probs}", "FR020"),
    ("minibatch: 16", "minibatch: 16, reads: {old_log_probs: old_logprobs, advantages: advantage}", "FR020 FR020"),
    ("minibatch: 16", "minibatch: 16, reads: {old_log_probs: old_logprob}", "FR020"),
    ("minibatch: 16, ", "", "FR008"),
    ("prompts: 32, ", "", "FR008"),
    ("prompts: 32", "prompts: 0", "FR007"),
    ("group: 8", "group: '8'", "FR006"),
    ("batch: {prompts: 32, group: 8}\n", "", "FR008"),
    ("type: arithmetic", "type: arithmetics", "FR011"),
    ("{type: arithmetic, size: 4096, seed: 0}", "{type: jsonl, path: sums.jsonl}", "FR018"),
    ("  train: {type: arithmetic", "  trian: {type: arithmetic", "FR008"),
    ("base: arith-tiny", "base: arith-tinny", "FR010"),
    ("base: arith-tiny", "bse: arith-tiny", "FR015 FR015"),
    ("model: reference", "model: refrence", "FR010"),
    ("update.policy, model: policy", "update.policy, model: reference", "FR024"),
    ("sync.weights, model: policy", "sync.weights, model: reference", "FR027"),
    ("model: policy, pool: generate", "model: policy, pool: genrate", "FR012"),
    ("model: policy, pool: generate", "modl: policy, pool: generate", "FR005"),
    ("model: policy, pool: generate", "model: policy, pol: generate", "FR005"),
    ("model: policy, pool: generate, ", "model: policy, ", "FR050"),
    ("model: policy, pool: generate, ", "pool: generate, ", "FR019"),
    ("  reward: ", "  # reward: ", "FR020"),
    ("  actor_update: ", "  # actor_update: ", "FR027"),
    ("  weight_sync: ", "  # weight_sync: ", "FR023"),
    ("  old_logprob: ", "  # old_logprob: ", "FR026"),
    ("schedule:   {mode: sync}", "schedule: {mode: synk}", "FR007"),
    ("schedule:   {mode: sync}", "schedule: {mode: sync, max_staleness: 1}", "FR072"),
    ("schedule:   {mode: sync}", "schedule: {max_staleness: 1}", "FR008"),
    ("schedule:   {mode: sync}", "schedule: {mode: separate_async, updates_per_sync: 3}", "FR060 FR071"),
    ("schedule:   {mode: sync}", "schedule: sync", "FR006"),
    ("flowrl: 1", "flowrl: 2", "FR007"),
    ("nodes:\n", "node:\n", "FR005"),
    ("models:\n", "model:\n", "FR005"),
    ("pools:\n", "pool:\n", "FR005"),
    ("data:\n", "dat:\n", "FR005"),
    ("run:        {steps: 100, seed: 0}", "run:      {step: 100}", "FR005"),
    ("type: mlflow", "type: mlfow", "FR007"),
]
"""Text of the default pipeline, what takes its place, and all errors that follow."""

TOGETHER = [
    ({"use: reward.exact_match": "use: reward.exact_mach", "minibatch: 16": "minibatch: 17"}, "FR009 FR060"),
    ({"log_probs: old_log_probs": "log_prob: old_log_probs", "lr: 3.0e-4": "lr: 0"}, "FR007 FR013"),
    ({"{use: advantage.grpo}": "{use: advantage.grpo, reads: {reward: rewrd}}", "group: 8": "group: true"},
     "FR006 FR020"),
    ({"model: reference": "model: refrence", "pool: generate": "pool: genrate"}, "FR010 FR012"),
    ({"temperature: 1.0": "temprature: 1.0", "minibatch: 16": "minibatch: five"}, "FR005 FR006"),
    ({"trainable: true, ": "", "steps: 100": "steps: -1"}, "FR007 FR024"),
    ({"  weight_sync: ": "  # ", "  ref_logprob: ": "  # "}, "FR020 FR023"),
    ({"mode: sync": "mode: separate_async", "minibatch: 16": "minibatch: 5"}, "FR060 FR071"),
    ({"  old_logprob: ": "  # ", "minibatch: 16": "minibatch: 5"}, "FR060"),
    ({"mode: sync": "mode: colocate_async", "pool: generate, ": ""}, "FR050"),
    ({"use: sync.weights, ": "use: sync.weights, pool: trian, ", "minibatch: 16": "minibatch: 5"}, "FR053 FR060"),
]  # fmt: skip
"""Several mistakes that are made at once, and all errors that follow."""


def errors(pipeline: Pipeline) -> str:
    return " ".join(sorted(problem.code for problem in pipeline.check() if problem.severity == "error"))


def changed(changes: dict[str, str], folder: Path) -> Pipeline:
    """The default pipeline with other text in it."""
    text = TEXT
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "wrong.yaml").write_text(text)
    return load(folder / "wrong.yaml")


@pytest.mark.parametrize(("old", "new", "codes"), MISTAKES, ids=[f"{old}->{new}" for old, new, _ in MISTAKES])
def test_a_mistake_is_its_own_error_and_no_other(old: str, new: str, codes: str, tmp_path: Path) -> None:
    assert errors(changed({old: new}, tmp_path)) == codes


@pytest.mark.parametrize(("changes", "codes"), TOGETHER, ids=[codes for _, codes in TOGETHER])
def test_mistakes_that_are_made_at_once_are_found_at_once(changes: dict[str, str], codes: str, tmp_path: Path) -> None:
    assert errors(changed(changes, tmp_path)) == codes


# Any change at all.

SHIPPED = [*sorted(ROOT.glob("pipelines/*.yaml")), *sorted(ROOT.glob("examples/*/pipeline.yaml"))]
Path_ = tuple[str | int, ...]

JUNK = [
    "null", "~", "", "true", "false", "0", "1", "-1", "2", "7", "-0", "0x10", "0o17", "017", "1_000", "1e400", "1.5",
    "0.0", "-1.0e-9", ".nan", ".inf", "-.inf", "9" * 30, "9" * 5000, "2024-01-31", "12:30:00", "yes", "off", "sync",
    "train", "policy", "reward", "rollout", "arithmetic", "jsonl", "mlflow", "none", "cpu", "update.policy",
    "reward.exact_match", "rollout.generate", "./nowhere.py:X", "json:JSONDecoder", "a:b:c", ":", "os", "$base", "$x",
    "$", "..", "/", "~/x",
    '""', '" "', '"\\0"', '"\\ud800"', '"\\n"', "é", "'*'", "x" * 300, "a.b", "a/b", "[]", "[[]]",
    "[1, two, {three: 3}]", "[reward, reward]", "[null]", "{}", "{a: 1}", "{use: reward.exact_match}", "{type: jsonl}",
    "{mode: separate_async}", "{mode: colocate_async, max_staleness: 0}", "{shares: train}", "{path: arith-tiny}",
    "{a: {b: {c: [{d: null}]}}}", "!!str 3", "!!binary aGk=", "!x {a: 1}", "{<<: {a: 1}}", "{1: 2}", "{[a]: b}",
    "&a [1]", "*a", "*nothing", "&r {x: *r}", "@x", "`x`", "%x", "- x", "a: b", "'", "{", "}", "#",
]  # fmt: skip
"""Values of every kind as YAML, some of them no YAML."""


@dataclass(frozen=True)
class Mutation:
    """One change of a document."""

    kind: str
    """drop, replace, add or double."""
    path: Path_
    key: str
    junk: str


def emit(value: Any, mutations: Sequence[Mutation], path: Path_ = ()) -> str:
    """The value as YAML on one line, changed."""
    here = [mutation for mutation in mutations if mutation.path == path]
    for mutation in here:
        if mutation.kind == "replace":
            return mutation.junk
    if isinstance(value, dict):
        entries = [
            (json.dumps(name), emit(item, mutations, (*path, name)), (*path, name)) for name, item in value.items()
        ]
        kept = [(name, text) for name, text, below in entries for _ in range(times(mutations, below))]
        kept += [(mutation.key, mutation.junk) for mutation in here if mutation.kind == "add"]
        return "{" + ", ".join(f"{name}: {text}" for name, text in kept) + "}"
    if isinstance(value, list):
        items = [(emit(item, mutations, (*path, number)), (*path, number)) for number, item in enumerate(value)]
        return "[" + ", ".join(text for text, below in items for _ in range(times(mutations, below))) + "]"
    return json.dumps(value)


def times(mutations: Sequence[Mutation], path: Path_) -> int:
    """How often the value at a path is written."""
    kinds = {mutation.kind for mutation in mutations if mutation.path == path}
    return 0 if "drop" in kinds else 2 if "double" in kinds else 1


def paths(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Where there is a value, at any depth."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from paths(item, (*path, name))


@functools.cache
def original(file: Path) -> tuple[Pipeline, Any, list[Path_]]:
    """A shipped pipeline, its data with files by their full names, and every path in it."""
    tree, _ = load_text(file.read_text(), Source(str(file)))
    assert tree is not None
    data = plain(tree)
    for section, key in (("nodes", "use"), ("data", "path")):
        for entry in filter(None, data.get(section, {}).values()):
            if "./" in entry.get(key, "") or entry.get(key, "").endswith(".jsonl"):
                entry[key] = str(file.parent / entry[key])
    if "extends" in data:
        data["extends"] = str(file.parent / data["extends"])
    pipeline = load(file)
    pipeline.plan()
    return pipeline, data, list(paths(data))


KEYS = st.sampled_from(["extends", "nodes", "use", "model", "pool", "reads", "writes", "gate", "every", "type", "mode",
                        "steps", "x", '"a b"', "1", "null", "2024-01-31", "[a]", '""', "<<", "$base"])  # fmt: skip


@st.composite
def mutations(draw: st.DrawFn, file: Path) -> list[Mutation]:
    kinds, where = st.sampled_from(["drop", "replace", "replace", "add", "double"]), st.sampled_from(original(file)[2])
    one = st.builds(Mutation, kinds, where, KEYS, st.sampled_from(JUNK))
    return draw(st.lists(one, min_size=1, max_size=3))


@settings(max_examples=300)
@given(st.sampled_from(SHIPPED), st.data())
def test_any_change_of_a_shipped_file_ends_in_problems_or_in_a_pipeline(file: Path, data: st.DataObject) -> None:
    pipeline, document, _ = original(file)
    text = emit(document, data.draw(mutations(file)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "changed.yaml"
        path.write_text(text, encoding="utf-8")
        judge(load(path), pipeline)


def judge(made: Pipeline, pipeline: Pipeline) -> None:
    """Whatever can be asked of a pipeline without running it is answered, or refused with problems."""
    found = made.check()
    for problem in found:
        assert problem.fact
        assert problem.render()
        assert problem.as_github()
        place = problem.place
        assert place.line >= 1 <= place.column
        assert not place.text or place.column - 1 + place.length <= len(place.text) + 1
    json.dumps([problem.as_data() for problem in found])
    if any(problem.severity == "error" for problem in found):
        with pytest.raises(PipelineError):
            made.plan()
        if made.reading.document is not None:
            assert made.draw("resolved")
        return
    assert not made.reading.broken, "what is refused is reported"
    for view in VIEWS:
        for unroll in (None, 2) if view not in ("plan", "resolved") else (None,):
            try:
                assert made.draw(view, unroll=unroll)
            except PictureError:
                assert view == "svg"
    for change in (*pipeline.diff(made), *made.diff(pipeline)):
        assert str(change)
    again = Pipeline(plain_of(made.resolved()))
    assert not [problem for problem in again.check() if problem.severity == "error"]
    assert again.reading.document is not None and again.resolved() == made.resolved()


def plain_of(text: str) -> Any:
    tree, problems = load_text(text, Source("resolved", text.splitlines()))
    assert tree is not None and not problems
    return plain(tree)


@pytest.mark.parametrize("file", SHIPPED, ids=[file.parent.name + "/" + file.stem for file in SHIPPED])
def test_what_is_resolved_is_the_same_pipeline(file: Path, tmp_path: Path) -> None:
    pipeline = load(file)
    (tmp_path / "resolved.yaml").write_text(pipeline.draw("resolved"))
    again = load(tmp_path / "resolved.yaml")
    assert errors(again) == ""
    assert again.resolved() == pipeline.resolved()
    assert again.diff(pipeline) == ()
