"""GGUF files as model folders: the same model, the right tokenizer, written once and whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_gguf import SPECIAL, tiny_llama, write_gguf

from flowrl.convert import convert, folder_of_gguf
from flowrl.gguf_header import read_header
from flowrl.graph.sizes.architecture import Architecture, Unknown
from flowrl.graph.sizes.model_config import read_architecture
from flowrl.model import ModelSpec
from flowrl.model_files import ModelError
from flowrl.nodes._backend.models import folder_of, load_model, load_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny_llama())


@pytest.fixture(scope="module")
def tokenizer(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return load_tokenizer(ModelSpec(path=f"gguf:{file}"))


def test_the_model_of_a_file_computes_what_the_model_did_that_was_written(file: Path) -> None:
    ids = torch.arange(20)[None]
    read = load_model(ModelSpec(path=f"gguf:{file}", trainable=True))
    assert torch.allclose(read(ids).logits, tiny_llama()(ids).logits, atol=1e-5)
    assert getattr(read.config, "quantization_config", None) is None
    assert all(parameter.requires_grad for parameter in read.parameters())
    assert read.lm_head.weight is read.model.embed_tokens.weight


def test_the_type_of_the_weights_is_asked_for(file: Path) -> None:
    assert load_model(ModelSpec(path=f"gguf:{file}", dtype="bfloat16")).dtype == torch.bfloat16


def test_all_tokens_that_end_a_turn_end_a_response(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0}
    write_gguf(tmp_path / "a.gguf", tiny_llama(), more=ends)
    assert load_model(ModelSpec(path=f"gguf:{tmp_path / 'a.gguf'}")).generation_config.eos_token_id == [0, 1, 2]


def test_special_tokens_of_the_template_are_single_ids(tokenizer: Any) -> None:
    turn = [{"role": "user", "content": "hel"}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>user\nhel<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert [ids.count(number) for number in range(3)] == [0, 2, 1]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == SPECIAL
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.model_max_length) == (2, 2, 64)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhel\nassistant\n"


@given(st.text(max_size=30).filter(lambda text: text.isprintable()))
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_digits_stand_alone_where_the_vocabulary_was_learned_so(tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizer.tokenize("a  1") == ["a", "ĠĠ", "1"]
    write_gguf(tmp_path / "a.gguf", tiny_llama(), pre="gpt-2")
    plain = load_tokenizer(ModelSpec(path=f"gguf:{tmp_path / 'a.gguf'}"))
    assert plain.tokenize("a  1") == ["a", "Ġ", "Ġ", "1"]


def test_a_vocabulary_that_nobody_can_split_needs_another_tokenizer(tmp_path: Path) -> None:
    path = f"gguf:{write_gguf(tmp_path / 'a.gguf', tiny_llama(), pre='made-up')}"
    with pytest.raises(ModelError, match=r"how the vocabulary of .* splits text: give `tokenizer:`"):
        load_tokenizer(ModelSpec(path=path))
    assert load_tokenizer(ModelSpec(path=path, tokenizer="arith-tiny")).vocab_size == 20
    assert load_model(ModelSpec(path=path)).num_parameters() > 0


def test_rotary_positions_that_transformers_would_ignore_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_llama(), more={"llama.rope.scaling.type": 1})
    with pytest.raises(ModelError, match="scales its rotary positions"):
        folder_of_gguf(path)


def test_values_that_transformers_would_leave_out_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_llama(attention_bias=True))
    with pytest.raises(ModelError, match=r"holds [\d,]+ values, and transformers makes a model of"):
        folder_of_gguf(path)


def test_a_file_that_is_cut_off_is_named(file: Path, tmp_path: Path) -> None:
    whole = file.read_bytes()
    for size in (4, 100, len(whole) // 2):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf' cannot be read"):
            folder_of_gguf(tmp_path / "cut.gguf")
    assert not list((tmp_path / "cache" / "flowrl" / "gguf").iterdir()), "nothing half done is left"


def test_a_file_is_converted_once_and_again_when_it_changes(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(file.read_bytes())
    first = folder_of_gguf(path)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert folder_of(ModelSpec(path=f"gguf:{path}")) == str(first)
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    os.utime(path, ns=(0, 0))
    assert folder_of_gguf(path) != first


def test_two_processes_at_once_make_one_folder(file: Path, tmp_path: Path) -> None:
    run = [sys.executable, "-c", f"import flowrl.convert as c; print(c.folder_of_gguf(c.Path({str(file)!r})))"]
    both = [subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = {process.communicate(timeout=120)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(folders) == 1
    assert list((tmp_path / "cache" / "flowrl" / "gguf").iterdir()) == [Path(folders.pop().strip())]


def test_what_a_killed_process_left_is_cleared_away(file: Path, tmp_path: Path) -> None:
    (tmp_path / ".there.unfinished").mkdir()
    (tmp_path / ".there.unfinished" / "model.safetensors").write_bytes(b"half")
    convert(file, tmp_path / "there")
    assert not (tmp_path / ".there.unfinished").exists()
    assert load_model(ModelSpec(path=str(tmp_path / "there"))).num_parameters() > 0


def test_sizes_are_known_from_the_header(file: Path, tmp_path: Path) -> None:
    found = read_architecture(f"gguf:{file}")
    assert isinstance(found, Architecture)
    assert found.num_parameters == tiny_llama().num_parameters() == sum(read_header(file).tensors.values())
    assert (found.max_positions, found.tied, found.head_dim) == (64, True, 8)
    odd = write_gguf(tmp_path / "a.gguf", tiny_llama(), more={"llama.attention.key_length": 16})
    other = read_architecture(f"gguf:{odd}")
    assert isinstance(other, Unknown)
    assert "its header describes" in other.reason


@given(st.data())
def test_no_header_raises_anything_else(file: Path, data: st.DataObject) -> None:
    content = bytearray(file.read_bytes()[: data.draw(st.integers(0, 4000))])
    for position in data.draw(st.lists(st.integers(4, 3000), max_size=3)):
        if position < len(content):
            content[position] = data.draw(st.integers(0, 255))
    broken = file.with_name("broken.gguf")
    broken.write_bytes(content)
    assert isinstance(read_architecture(f"gguf:{broken}"), Unknown | Architecture)
