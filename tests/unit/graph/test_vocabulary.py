"""Models that read each other's token ids: what their files tell of the words that the ids stand for."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flowrl.graph.vocabulary import difference
from flowrl.model import ModelSpec
from flowrl.model_files import ASSETS

WORDS = {"<eos>": 0, "a": 1, "b": 2}


def tokenizer(folder: Path, model: dict[str, Any], added: dict[str, int] | None = None) -> ModelSpec:
    folder.mkdir()
    tokens = [{"id": token, "content": word} for word, token in (added or {}).items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": tokens}))
    return ModelSpec(path="arith-tiny", tokenizer=str(folder))


def told(writer: ModelSpec, reader: ModelSpec) -> str:
    return difference({"policy": writer, "teacher": reader}, "policy", "teacher")


def test_the_same_words_in_another_file_are_the_same(tmp_path: Path) -> None:
    pairs = tokenizer(tmp_path / "unigram", {"vocab": [[word, -1.0] for word in WORDS]})
    mapping = tokenizer(tmp_path / "bpe", {"vocab": {"a": 1, "b": 2}, "merges": []}, {"<eos>": 0})
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "vocab.json").write_text(json.dumps(WORDS))
    specs = [pairs, mapping, ModelSpec(path="arith-tiny", tokenizer=str(plain))]
    assert [told(one, other) for one in specs for other in specs] == [""] * 9


def test_a_reader_may_know_more_words_but_not_fewer_nor_others(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "ours", {"vocab": WORDS})
    more = tokenizer(tmp_path / "more", {"vocab": WORDS}, {"<think>": 3})
    other = tokenizer(tmp_path / "other", {"vocab": {"<eos>": 0, "b": 1, "a": 2}})
    assert told(ours, more) == ""
    assert told(more, ours) == "'<think>' is token 3 of models.policy, and no token of models.teacher"
    assert told(ours, other) == "'a' is token 1 of models.policy, and token 2 of models.teacher"


def test_a_copy_of_a_model_in_another_folder_is_the_same(tmp_path: Path) -> None:
    shutil.copytree(ASSETS / "arith-tiny", tmp_path / "copy")
    assert told(ModelSpec(path="arith-tiny"), ModelSpec(path=str(tmp_path / "copy"))) == ""


@pytest.mark.parametrize("text", ["", "[]", '{"model": 3}', '{"model": {"vocab": {"a": "b"}}, "added_tokens": [1]}'])
def test_a_file_that_cannot_be_read_is_no_difference(tmp_path: Path, text: str) -> None:
    broken = tokenizer(tmp_path / "broken", {})
    (tmp_path / "broken" / "tokenizer.json").write_text(text)
    assert told(ModelSpec(path="arith-tiny"), broken) == ""


def test_models_that_are_not_here_are_compared_by_their_sizes_but_for_a_padding(tmp_path: Path) -> None:
    small, large = (ModelSpec(path=f"Qwen/Qwen2.5-{size}-Instruct") for size in ("0.5B", "7B"))
    assert told(small, large) == ""
    assert told(small, ModelSpec(path="someone/unheard-of")) == ""
    assert told(ModelSpec(path="arith-tiny"), small) == "models.policy knows 20 words, and models.teacher 151,936"
