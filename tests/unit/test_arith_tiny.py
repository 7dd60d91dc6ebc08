"""The shipped model `arith-tiny`: small, loadable without a network, and able to add."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / "nodes" / "assets" / "arith-tiny"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, local_files_only=True).eval()


def test_weights_are_float32_and_at_most_four_megabytes(model: Any) -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= 4_000_000
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_eos_and_pad_are_distinct_and_agree_between_tokenizer_and_model(tokenizer: Any, model: Any) -> None:
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    for config in (model.config, model.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("text", ["", "7+35=", "49+49=98", "0123456789+-*/=() ", " 1  + 2 = "])
def test_text_round_trips_one_token_a_character_without_special_tokens(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_tokenizer_is_fast_and_pads_on_the_left(tokenizer: Any) -> None:
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    batch = tokenizer(["1+1=", "10+10="], padding=True)
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1]


def test_eos_is_left_out_of_the_text(tokenizer: Any) -> None:
    ids = [*tokenizer("98")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "98"


def test_unknown_character_is_an_error_and_not_dropped(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="UNK"):
        tokenizer("1+x=")


def test_greedy_answers_are_nearly_all_right(tokenizer: Any, model: Any) -> None:
    generator = random.Random(0)
    pairs = [(generator.randrange(50), generator.randrange(50)) for _ in range(200)]
    batch = tokenizer([f"{a}+{b}=" for a, b in pairs], padding=True, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**batch, do_sample=False, max_new_tokens=8)
    answers = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    num_right = sum(answer == str(a + b) for answer, (a, b) in zip(answers, pairs, strict=True))
    assert num_right >= 180
