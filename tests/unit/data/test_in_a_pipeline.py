"""Data sets in a pipeline: fields and their readers, paths, what a load finds before a worker starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import flowrl
from flowrl.errors import PipelineError, Problem
from flowrl.fields import FieldType
from flowrl.launch import rehearse
from flowrl.model_files import ASSETS

ROWS = [{"question": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]
NODES = """
from typing import Any, NamedTuple, Sequence

from flowrl import Json, Node, Prompt, Rows, Sample, Token
from flowrl.model import ModelSpec


class Rollout(Node):
    scope = "group"
    weights = "generates"
    cardinality = "expands"
    device = "accelerator"

    counts: bool = True
    template: int = 2
    fails: bool = False

    class Out(NamedTuple):
        rows: Rows
        response: Sample[str]

    def prompt_lengths(self, model: ModelSpec, prompts: Sequence[Any]) -> Sequence[int] | None:
        if self.fails:
            raise OSError("no tokenizer")
        assert all(isinstance(prompt, (str, list)) for prompt in prompts)
        return [len(prompt) + self.template for prompt in prompts] if self.counts else None

    def run(self, prompt: Prompt[Json]) -> Out:
        raise NotImplementedError


class Answer(Node):
    class Out(NamedTuple):
        reward: Sample[float]

    def run(self, response: Sample[str], answer: Prompt[str]) -> Out:
        raise NotImplementedError
"""


def rows_file(folder: Path) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return "rows.jsonl"


def pipeline(folder: Path, train: dict[str, Any], sets: Sequence[str] = (), **rollout: Any) -> flowrl.Pipeline:
    """A rollout and a reward of the user's over this data."""
    (folder / "nodes.py").write_text(NODES)
    document = {
        "flowrl": 1,
        "name": "mine",
        "models": {"policy": {"path": "arith-tiny"}},
        "data": {"train": train},
        "batch": {"prompts": 8, "group": 2},
        "pools": {"generate": {"workers": 1}},
        "nodes": {
            "rollout": {"use": "./nodes.py:Rollout", "model": "policy", "pool": "generate", **rollout},
            "reward": {"use": "./nodes.py:Answer"},
        },
    }
    return flowrl.Pipeline(document, folder, sets)


def errors(built: flowrl.Pipeline) -> list[Problem]:
    return [problem for problem in built.check() if problem.severity == "error"]


def sources(folder: Path) -> dict[str, dict[str, Any]]:
    """The same rows as every kind of set that has columns of its own."""
    rows_file(folder)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    (folder / "make.py").write_text(f"def rows():\n    return {ROWS!r}\n")
    return {
        "jsonl": {"type": "jsonl", "path": "rows.jsonl"},
        "parquet": {"type": "parquet", "path": "*.parquet"},
        "hf": {"type": "hf", "path": "json", "data_files": "rows.jsonl"},
        "python": {"type": "python", "call": "./make.py:rows"},
        "mixture": {"type": "mixture", "sources": {"one": {"type": "jsonl", "path": "rows.jsonl"}}},
    }


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hf", "python", "mixture"])
def test_relative_paths_start_at_the_pipeline_and_a_missing_column_is_told_with_those_there_are(
    tmp_path: Path, kind: str
) -> None:
    (problem,) = errors(pipeline(tmp_path, sources(tmp_path)[kind]))
    assert (problem.code, problem.place.path) == ("FR020", "nodes.rollout")
    assert "reads 'prompt', which nothing writes" in problem.fact
    assert "'question'" in str(problem.notes) and "'answer'" in str(problem.notes)
    assert errors(pipeline(tmp_path, sources(tmp_path)[kind], reads={"prompt": "question"})) == []


def test_a_missing_column_of_a_task_is_told_too(tmp_path: Path) -> None:
    train = {"type": "reasoning_gym", "task": "graph_color"}
    (problem,) = errors(pipeline(tmp_path, train))
    assert "reads 'answer', which nothing writes" in problem.fact
    assert problem.notes[-1] == "the columns of the data: 'prompt' (str), 'data_source' (str), 'entry' (json)"


def test_a_json_port_reads_text_and_no_other_port_reads_json(tmp_path: Path) -> None:
    json_, text = FieldType("Prompt", "json"), FieldType("Prompt", "str")
    assert json_.accepts(text) and json_.accepts(json_) and not text.accepts(json_)
    assert not json_.accepts(FieldType("Sample", "str"))
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": {"a": 1}}\n' * 8)
    (problem,) = errors(pipeline(tmp_path, {"type": "jsonl", "path": "chat.jsonl"}))
    assert (problem.code, problem.place.path) == ("FR022", "nodes.reward")


@pytest.mark.parametrize("value", [5, 1.5, True])
@pytest.mark.parametrize("column", ["prompt", "question"])
def test_a_column_of_numbers_is_no_prompt(tmp_path: Path, column: str, value: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({column: value, "answer": "b"}) + "\n")
    reads = {"reads": {"prompt": column}} if column != "prompt" else {}
    train = {"type": "jsonl", "path": "rows.jsonl"}
    (problem,) = errors(pipeline(tmp_path, train, ["batch.prompts=1"], **reads))
    assert problem.code == "FR022"
    assert f"the column '{column}' as prompts, which are text or chat messages" in problem.fact
    assert problem.fix


@pytest.mark.parametrize(
    ("value", "fact"),
    [
        (None, "a prompt is a string or a list of chat messages"),
        ("", "it is empty"),
        ([], "it holds no message"),
        ([1, 2], "message 1 is no mapping"),
        (["a"], "message 1 is no mapping"),
        ([{"role": "user"}], "message 1 has no content"),
        ({"role": "user", "content": "a"}, "a prompt is a string or a list of chat messages"),
        (7, "a prompt is a string or a list of chat messages"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("mixed", [False, True])
def test_what_is_no_prompt_is_refused_with_its_row_whatever_its_column_is_called(
    tmp_path: Path, value: Any, fact: str, streaming: bool, mixed: bool
) -> None:
    rows = [{"ask": [{"role": "user", "content": "a"}], "answer": "b"}] * 4 + [{"ask": value, "answer": "b"}] * 12
    (tmp_path / "make.py").write_text(f"def rows():\n    return {rows!r}\n")
    train: dict[str, Any] = {"type": "python", "call": "./make.py:rows", "streaming": streaming}
    name = "data.train.sources.one" if mixed else "data.train"
    train = {"type": "mixture", "sources": {"one": train}} if mixed else train
    with pytest.raises(PipelineError) as raised:
        dry_run(pipeline(tmp_path, train, reads={"prompt": "ask"}, counts=False))
    (problem,) = raised.value.problems
    assert (problem.code, problem.place.path) == ("FR018", f"{name}.type"), problem.fact
    assert f"row 5 of {name}: 'ask' is" in problem.fact
    assert fact in problem.fact
    assert len(problem.notes) == (0 if streaming else 9)


def test_an_empty_prompt_is_told_by_a_check_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt": "", "answer": "b"}\n' * 8)
    first, *_ = errors(pipeline(tmp_path, {"type": "jsonl", "path": "rows.jsonl"}))
    assert (first.code, first.place.line) == ("FR018", 3)
    assert "which is no prompt: it is empty" in first.fact


def test_messages_for_a_model_without_a_chat_template_are_refused_before_a_worker_starts(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}] * 40
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copytree(ASSETS / "arith-tiny", tmp_path / "plain")
    text = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps({**text, "chat_template": None}))
    (tmp_path / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "p.yaml").write_text(
        "extends: grpo_sync\nname: p\nmodels: {policy: {path: ./plain}}\n"
        "data: {train: {type: jsonl, path: chat.jsonl}}\n"
    )
    built = flowrl.load(tmp_path / "p.yaml")
    assert errors(built) == []
    with pytest.raises(PipelineError) as raised:
        dry_run(built)
    (problem,) = raised.value.problems
    assert (problem.code, problem.place.path) == ("FR018", "data.train.type")
    assert "the tokenizer has no chat template" in problem.fact
    assert problem.fix == "give prompts as text, or the model a `chat_template`"


def test_a_column_named_as_an_output_has_two_writers(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b", "response": "c"}\n' * 8)
    (problem,) = errors(pipeline(tmp_path, {"type": "jsonl", "path": "rows.jsonl"}))
    assert (problem.code, problem.place.path) == ("FR021", "nodes.rollout")
    assert "'response', which the training data writes already" in problem.fact


TRAIN = {"type": "jsonl", "path": "rows.jsonl", "rename": {"prompt": "question"}}


def dry_run(built: flowrl.Pipeline) -> str:
    return rehearse(built.plan(), built.reading, local=True, address=None)


def test_prompts_are_counted_after_templating_and_reported(tmp_path: Path) -> None:
    rows_file(tmp_path)
    said = dry_run(pipeline(tmp_path, {**TRAIN, "max_prompt_tokens": 6}))
    assert "data.train: 30 of 40 prompts have more than 6 tokens and are left out; the longest has 7" in said
    assert "all 40 prompts have at most 7 tokens" in dry_run(pipeline(tmp_path, {**TRAIN, "max_prompt_tokens": 7}))
    unable = dry_run(pipeline(tmp_path, {**TRAIN, "max_prompt_tokens": 1}, counts=False))
    assert "max_prompt_tokens has no effect" in unable


@pytest.mark.parametrize(
    ("settings", "rollout", "path", "fact"),
    [
        ({"max_prompt_tokens": 4}, {}, "data.train.max_prompt_tokens", "8 prompts are needed at once, but there are 0"),
        ({"max_prompt_tokens": 6, "overlong": "error"}, {}, "data.train.max_prompt_tokens", "30 of 40 prompts"),
        ({"max_prompt_tokens": 6}, {"fails": True}, "data.train.max_prompt_tokens", "no tokenizer"),
    ],
)
def test_what_a_load_refuses_is_refused_before_a_worker_starts(
    tmp_path: Path, settings: dict[str, Any], rollout: dict[str, Any], path: str, fact: str
) -> None:
    rows_file(tmp_path)
    built = pipeline(tmp_path, {**TRAIN, **settings}, [f"run.dir={tmp_path / 'runs'}"], **rollout)
    for start in (lambda: dry_run(built), lambda: built.run(local=True, quiet=True)):
        with pytest.raises(PipelineError) as raised:
            start()
        (problem,) = raised.value.problems
        assert (problem.code, problem.place.path) == ("FR018", path)
        assert fact in problem.fact
    assert not (tmp_path / "runs").exists()


def test_paths_of_sources_start_at_the_file_that_says_them(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    rows_file(tmp_path / "base")
    (tmp_path / "base" / "make.py").write_text("def rows():\n    return [{'prompt': 'a', 'answer': 'b'}] * 40\n")
    (tmp_path / "base" / "base.yaml").write_text(
        "extends: grpo_sync\nname: base\ndata:\n  train:\n    type: mixture\n    sources:\n"
        "      a: {type: jsonl, path: rows.jsonl, rename: {prompt: question}}\n"
        "      b: {type: python, call: './make.py:rows'}\n"
        "      c: {type: hf, path: json, data_files: [rows.jsonl], rename: {prompt: question}}\n"
    )
    (tmp_path / "over.yaml").write_text("extends: base/base.yaml\nname: over\n")
    assert errors(flowrl.load(tmp_path / "over.yaml")) == []
    assert "mixture of 33.3% a, 33.3% b, 33.3% c" in flowrl.load(tmp_path / "over.yaml").draw("plan")


def test_the_schema_knows_every_kind() -> None:
    import jsonschema

    from flowrl.spec.schema import pipeline_schema

    kinds = ["arithmetic", "jsonl", "parquet", "hf", "reasoning_gym", "python", "mixture"]
    shown = json.dumps(pipeline_schema())
    assert all(f'"const": "{kind}"' in shown for kind in kinds)
    document = {"extends": "grpo_sync", "name": "x", "data": {"train": {"type": "hf", "path": "openai/gsm8k"}}}
    jsonschema.validate(document, pipeline_schema())


PLAIN = {"type": "jsonl", "path": "rows.jsonl"}
FILES = {"type": "hf", "path": "json", "data_files": "rows.jsonl"}


@pytest.mark.parametrize(
    ("train", "code", "key", "fact", "fix"),
    [
        ({"type": "parquet", "path": []}, "FR007", "path", "at least 1 item, not 0", "add what is missing"),
        ({"type": "jsonl", "path": ""}, "FR007", "path", "at least 1 character, not 0", "write some text"),
        ({**PLAIN, "columns": {"question": "text"}}, "FR007", "columns.question", "not 'text'", "write one of these"),
        ({**PLAIN, "path": "*.jsonl"}, "FR018", "path", "a pattern is none", "path: one file"),
        ({"type": "parquet", "path": "*.parquet"}, "FR018", "path", "no file matches", "path: files or a pattern"),
        ({**FILES, "data_files": "raws*.jsonl"}, "FR018", "data_files", "no file matches", "'rows.jsonl'"),
        ({**FILES, "path": "jsn"}, "FR018", "path", "there is no loader 'jsn'", "did you mean 'json'?"),
        ({**FILES, "name": "main"}, "FR007", "name", "which have no name", "remove `name:`"),
        ({**FILES, "revision": "main"}, "FR007", "revision", "which have no revision", "remove `revision:`"),
        ({**PLAIN, "overlong": "error"}, "FR007", "overlong", "has no effect", "max_prompt_tokens: "),
        ({**FILES, "buffer": 5}, "FR007", "buffer", "has no effect", "streaming: true"),
        ({**PLAIN, "columns": {"qestion": "str"}}, "FR018", "columns.qestion", "has no column", "'question'?"),
        (
            {**PLAIN, "columns": {"question": "str"}, "extract": {"answer": "a"}},
            "FR018", "extract.answer", "is not taken", "add answer: str to columns:",
        ),
        (
            {**PLAIN, "rename": {"prompt": "question"}, "extract": {"question": "a"}},
            "FR018", "extract.question", "is not there", "extract: {prompt: ...}",
        ),
        ({**PLAIN, "extract": {"answer": "("}}, "FR007", "extract", "no regular expression", "a backslash"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_meant_is_refused_with_what_to_write(
    tmp_path: Path, train: dict[str, Any], code: str, key: str, fact: str, fix: str
) -> None:
    rows_file(tmp_path)
    first, *_ = errors(pipeline(tmp_path, train))
    assert (first.code, first.place.path) == (code, f"data.train.{key}")
    assert fact in first.fact
    assert fix in first.fix


@pytest.mark.parametrize(
    ("row", "settings", "fix"),
    [
        ({"n": 2**64}, {}, "a field has 64 bits for it: write the column as text"),
        ({"n": 1e39}, {}, "a field has 32 bits for it: write the column as text"),
        ({"n": 5}, {"columns": {"n": "str"}}, "columns: {n: int}"),
        ({"n": 5}, {"extract": {"n": "a"}}, "remove 'n' from extract:"),
        ({"n": "b"}, {"extract": {"n": "a"}}, "take a pattern that finds something"),
        ({"n": "\ud800"}, {}, "write whole characters"),
    ],
)
def test_a_bad_row_says_what_to_do_about_its_own_fault(
    tmp_path: Path, row: dict[str, Any], settings: dict[str, Any], fix: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    first, *_ = errors(pipeline(tmp_path, {**PLAIN, **settings}, ["batch.prompts=1"]))
    assert (first.code, first.place.line) == ("FR018", 1)
    assert fix in first.fix
