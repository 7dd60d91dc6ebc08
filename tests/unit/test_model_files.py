"""Names of models: what each stands for, and what is wrong with one that stands for nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowrl
from flowrl.errors import PipelineError
from flowrl.launch import rehearse
from flowrl.model import ModelSpec, SettingError
from flowrl.model_files import (
    causal_fault,
    content_fault,
    fault_of,
    fetched_folder,
    is_local,
    local_folder,
    template_fault,
)

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "pipelines" / "grpo_sync.yaml"


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_shipped_a_fetched_and_an_own_folder_are_found(tmp_path: Path) -> None:
    assert local_folder("arith-tiny") == ROOT / "flowrl" / "nodes" / "assets" / "arith-tiny"
    assert local_folder("smollm2") is None
    fetched_folder("smollm2").mkdir(parents=True)
    assert local_folder("smollm2") == tmp_path / "cache" / "flowrl" / "models" / "smollm2"
    assert local_folder(str(tmp_path)) == tmp_path
    assert local_folder("owner/model-1b") is None and not is_local("owner/model-1b")


def test_what_is_not_fetched_says_which_command_fetches_it() -> None:
    fault = fault_of("smollm2")
    assert fault is not None
    assert fault.fix == "flowrl fetch smollm2"
    assert [problem.fix for problem in flowrl.load(DEFAULT, ["params.base=smollm2"]).check()] == [fault.fix]


@pytest.mark.parametrize(
    ("name", "content", "path", "fact", "fix"),
    [
        ("m.gguf", b"GGUF", "m.gguf", "is a file, not a folder", "give gguf:"),
        ("m.gguf", b"GGUX", "gguf:m.gguf", "is no GGUF file", "give a shipped name"),
        ("model.gguf", b"GGUF", "gguf:modle.gguf", "there is no file", "did you mean 'model.gguf'?"),
        ("model.gguf", b"GGUF", "gguf:.", "is a folder, not a GGUF file", "model.gguf"),
        ("model.gguf", b"GGUF", "./", "has no config.json", "give gguf:"),
        ("adapter_config.json", b"{}", "./", "it holds an adapter", "merge it"),
        ("model.safetensors", b"", "model.safetensors", "is a file, not a folder", "the model's folder"),
        ("other", b"", "gguf:", "is a folder, not a GGUF file", "gguf:FILE.gguf"),
        ("other", b"", "a/b/c", "no hub id looks like that", "give a shipped name"),
        ("other", b"", "../nowhere", "no hub id looks like that", "give a shipped name"),
        ("other", b"", "weights/model.safetensors", "there is no file", "give a shipped name"),
        ("other", b"", "smolm2", "no shipped model is called", "did you mean 'smollm2'?"),
    ],
)
def test_a_name_that_stands_for_nothing_says_what_to_write(
    name: str, content: bytes, path: str, fact: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / name).write_bytes(content)
    monkeypatch.chdir(folder)
    fault = fault_of(path if path != "gguf:." else f"gguf:{folder}")
    assert fault is not None
    assert fact in fault.fact
    assert fix in fault.fix


@given(st.text(max_size=40), st.booleans())
def test_no_name_raises(name: str, is_file: bool) -> None:
    fault_of("gguf:" * is_file + name)
    template_fault(name)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-0.5B-Instruct", "gpt2", "me/arith-tiny", "meta-llama/Llama-3.2-1B"])
def test_a_name_that_the_hub_may_have_is_left_to_it(name: str) -> None:
    assert fault_of(name) is None


def test_relative_paths_start_at_the_file_that_says_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "mine").mkdir()
    (tmp_path / "a.yaml").write_text(
        f"extends: {DEFAULT}\nname: a\nmodels:\n"
        "  policy: {path: 'gguf:m.gguf', tokenizer: mine, chat_template: chat.jinja}\n"
        "  reference: {path: m.gguf, chat_template: '{{ messages[0].content }}'}\n"
    )
    monkeypatch.chdir(ROOT)
    document = flowrl.load(tmp_path / "a.yaml").reading.document
    assert document is not None
    policy, reference = document.models["policy"], document.models["reference"]
    assert policy.path == f"gguf:{tmp_path / 'm.gguf'}"
    assert (policy.tokenizer, policy.chat_template) == (str(tmp_path / "mine"), str(tmp_path / "chat.jinja"))
    assert (reference.path, reference.chat_template) == (str(tmp_path / "m.gguf"), "{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("template", "fact"),
    [
        ("{% if %}", "is broken in line 1"),
        ("no_such_file.jinja", "cannot read the chat template 'no_such_file.jinja': No such file"),
        ("one\ntwo", "it has no {{ }}"),
    ],
)
def test_a_chat_template_that_cannot_work_is_refused(template: str, fact: str) -> None:
    fault = template_fault(template)
    assert fault is not None
    assert fact in fault.fact


def test_the_tags_of_transformers_are_known() -> None:
    text = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert template_fault(text) is None


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention", "kernels-community/vllm-flash-attn3"])
def test_attention_that_transformers_knows_is_taken(name: str) -> None:
    assert ModelSpec(path="x", attn_implementation=name).attn_implementation == name
    with pytest.raises(ValueError, match="no attention called"):
        ModelSpec(path="x", attn_implementation=name.replace("/", "") + "x")


def test_flash_attention_needs_a_narrow_type() -> None:
    with pytest.raises(ValueError, match="computes in 16 bits"):
        ModelSpec(path="x", attn_implementation="flash_attention_2")
    assert ModelSpec(path="x", attn_implementation="flash_attention_2", dtype="bfloat16")
    assert issubclass(SettingError, ValueError)


def test_only_the_hub_has_revisions() -> None:
    sets = ["models.policy.revision=main"]
    assert [p.code for p in flowrl.load(DEFAULT, sets).check()] == ["FR007"]
    assert flowrl.load(DEFAULT, [*sets, "models.policy.path=owner/model"]).check() == ()


# What is in a folder.


def folder_with(tmp_path: Path, without: str = "", files: dict[str, Any] | None = None, **config: Any) -> Path:
    """A copy of the shipped model without the files of a pattern, with others, and with other keys in config.json."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "nodes" / "assets" / "arith-tiny", folder)
    for file in folder.glob(without) if without else ():
        file.unlink()
    given = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    for name, content in (files or {}).items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n"


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"files": {"config.json": "{"}}, "cannot be read: it is no JSON"),
        ({"files": {"config.json": "[" * 100_000}}, "cannot be read: "),
        ({"files": {"config.json": [1]}}, "cannot be read: it holds no mapping"),
        ({"model_type": None}, "names no model_type"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "is a BertForMaskedLM, which is no causal"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "which is no causal"),
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "which is no causal"),
        ({"architectures": ["T5EncoderModel"]}, "which is no causal"),
        ({"without": "*.safetensors"}, "has no weights"),
        ({"without": "*.safetensors", "files": {"model.safetensors.index.json": INDEX}}, "has no weights"),
        ({"files": {"model.safetensors": LFS}}, "is cut off, or no safetensors file"),
        ({"files": {"model.safetensors": ""}}, "is cut off, or no safetensors file"),
        ({"without": "token*"}, "has no tokenizer"),
    ],
)
def test_a_folder_that_holds_no_such_model_is_refused_by_a_check(
    settings: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path, **settings)
    (problem,) = flowrl.load(DEFAULT, [f"models.policy.path={folder}"]).check()
    assert (problem.code, problem.severity, problem.place.path) == ("FR010", "error", "models.policy.path")
    assert fact in problem.fact
    assert problem.fix


def test_files_of_weights_that_an_index_names_must_be_there(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, files={"model.safetensors.index.json": INDEX})
    assert content_fault(str(folder)) is None, "a whole file goes before an index"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    fault = content_fault(str(folder))
    assert fault is not None and "lacks 1 of 2 files of weights: model-00002-of-00002.safetensors" in fault.fact
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")
    assert content_fault(str(folder)) is None
    (folder / "model.safetensors.index.json").write_text("[]")
    fault = content_fault(str(folder))
    assert fault is not None and "cannot be read" in fault.fact


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "Gemma3ForConditionalGeneration", "LlamaModel", "MineForCausalLM"])
def test_other_names_of_causal_models_are_taken(kind: str, tmp_path: Path) -> None:
    assert causal_fault(str(folder_with(tmp_path, architectures=[kind]))) is None


def test_a_classifier_is_a_model_for_whoever_only_reads_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, architectures=["LlamaForSequenceClassification"])
    assert flowrl.load(DEFAULT, [f"models.reference.path={folder}"]).check() == ()


@pytest.mark.parametrize(
    ("settings", "fact", "fix"),
    [
        ({"model_type": "no_such_type"}, "cannot be loaded", "give a causal"),
        ({"architectures": None, "model_type": "bert"}, "'bert', which is no causal language model", "decoder-only"),
        ({"architectures": None, "model_type": "vit"}, "'vit', which is no causal language model", "decoder-only"),
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}},
            "needs Python files that come with it",
            "`trust_remote_code: true`",
        ),
        ({"files": {"tokenizer.json": "{"}}, "tokenizer in", "with its tokenizer"),
    ],
)
def test_what_only_transformers_knows_is_found_by_a_rehearsal(
    settings: dict[str, Any], fact: str, fix: str, tmp_path: Path
) -> None:
    built = flowrl.load(DEFAULT, [f"models.policy.path={folder_with(tmp_path, **settings)}"])
    assert built.check() == ()
    with pytest.raises(PipelineError) as raised:
        rehearse(built.plan(), built.reading, local=True, address=None)
    (problem,) = raised.value.problems
    assert (problem.code, problem.place.path) == ("FR010", "models.policy.path")
    assert fact in problem.fact
    assert fix in problem.fix


def test_a_filter_that_no_template_has_is_found_by_a_check() -> None:
    fault = template_fault("{{ messages[0].content | shout }}")
    assert fault is not None
    assert "No filter named 'shout'" in fault.fact
