"""Names of models: what each stands for, and what is wrong with one that stands for nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowrl
from flowrl.model import ModelSpec, SettingError
from flowrl.model_files import fault_of, fetched_folder, is_local, local_folder, template_fault

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
