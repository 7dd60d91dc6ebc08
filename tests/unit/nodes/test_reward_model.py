"""A sequence classifier as a reward: a text's score depends on that text alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

import flowrl
from flowrl.batch import Prompt, Sample
from flowrl.metrics import Report, collect
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.models import load_tokenizer
from flowrl.nodes.reward.model import Model
from flowrl.rows import Rows

TOY = Path(Model.toy_model)
TEXTS = ["1", "12+34", "", "7", "((1+2)*3)/4", "99", "1+", "5*5*5*5*5*5"]
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Folder of a random classifier that reads the tokens of the toy one."""

    def made(kind: str, num_labels: int = 1, pad: int | None = None, template: bool = True) -> Path:
        where = tmp_path_factory.mktemp(kind)
        torch.manual_seed(0)
        common: dict[str, Any] = {"vocab_size": 21, "num_labels": num_labels, "pad_token_id": pad}
        if kind == "llama":
            sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            model = LlamaForSequenceClassification(LlamaConfig(**common, **sizes, max_position_embeddings=64))
        elif kind == "gpt2":
            config = GPT2Config(**common, n_embd=32, n_layer=2, n_head=2, n_positions=64)
            model = GPT2ForSequenceClassification(config)
        else:
            sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
            model = BertForSequenceClassification(
                BertConfig(**common, **sizes, max_position_embeddings=64, hidden_dropout_prob=0.5)
            )
        for parameter in model.parameters():
            if parameter.ndim > 1:  # a fresh model is nearly constant, which would hide mistakes
                parameter.data.mul_(4.0)
        model.save_pretrained(where)
        for file in TOY.glob("tokenizer*"):
            shutil.copy(file, where)
        if not template:
            config_file = where / "tokenizer_config.json"
            config_file.write_text(config_file.read_text().replace("chat_template", "no_template"))
        return where

    return made


def context(path: Path, rank: int = 0, num_ranks: int = 1) -> Context:
    return Context(models={"rm": ModelSpec(path=str(path))}, model="rm", rank=rank, num_ranks=num_ranks)


def scores(
    path: Path, texts: list[str] = TEXTS, rank: int = 0, num_ranks: int = 1, prompts: Any = None, **settings: Any
) -> tuple[dict[str, float], Report]:
    """By response."""
    node = Model(**settings)
    node.setup(context(path, rank, num_ranks))
    rows = Rows.of([f"u{index}" for index in range(len(texts))])
    with collect() as report:
        out = node.run(Sample(rows, texts), Prompt(rows, prompts or ["8+8="] * len(texts)))
    named = dict(zip(rows.names(), texts, strict=True))
    return {named[name]: score for name, score in zip(out.reward.rows.names(), out.reward, strict=True)}, report


def alone(path: Path, text: str) -> np.ndarray:
    """The logits of transformers itself, for one text without any padding."""
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    ids = load_tokenizer(ModelSpec(path=str(path)))("8+8=" + text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        found: np.ndarray = model(input_ids=ids).logits[0].numpy()
    return found


@pytest.mark.parametrize("pad", [None, 0, 1])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_order_batch_and_padding_change_nothing(folder: Make, kind: str, pad: int | None) -> None:
    path = folder(kind, pad=pad)
    whole, report = scores(path)
    assert not report.failures
    assert np.ptp(list(whole.values())) > 1e-2
    expected = {text: float(alone(path, text)[0]) for text in TEXTS}
    for found in (whole, scores(path, TEXTS[::-1])[0], scores(path, max_tokens_per_microbatch=1)[0],
                  scores(path, max_tokens_per_microbatch=40)[0]):  # fmt: skip
        assert found == pytest.approx(expected, abs=1e-6 * max(1.0, *map(abs, expected.values())))


def test_ranks_share_the_rows(folder: Make) -> None:
    path = folder("llama")
    shares = [scores(path, rank=rank, num_ranks=3)[0] for rank in range(3)]
    assert sorted(text for share in shares for text in share) == sorted(TEXTS)
    assert shares[0] | shares[1] | shares[2] == pytest.approx(scores(path)[0], abs=1e-6)
    assert sum(map(len, (scores(path, ["1"], rank=rank, num_ranks=3)[0] for rank in range(3)))) == 1


def test_the_wanted_label_gives_its_log_odds_or_its_probability(folder: Make) -> None:
    path = folder("llama", num_labels=3)
    logits = alone(path, "7").astype(np.float64)
    shares = np.exp(logits) / np.exp(logits).sum()
    for label in range(3):
        odds = np.log(shares[label] / (1 - shares[label]))
        assert scores(path, ["7"], label=label)[0]["7"] == pytest.approx(odds, abs=1e-4)
        found = scores(path, ["7"], label=label, output="probability")[0]["7"]
        assert found == pytest.approx(shares[label], abs=1e-5)
    one = folder("llama")
    assert scores(one, ["7"], output="probability")[0]["7"] == pytest.approx(1 / (1 + np.exp(-alone(one, "7")[0])))


def test_labels_that_do_not_fit_the_model_are_told_at_the_start(folder: Make) -> None:
    several, one = folder("llama", num_labels=2), folder("llama")
    for settings in ({}, {"label": 2}):
        with pytest.raises(ValueError, match=r"has 2 labels: set `label` to one of 0 \(LABEL_0\), 1 \(LABEL_1\)"):
            scores(several, **settings)
    with pytest.raises(ValueError, match="has one label: leave `label` out"):
        scores(one, label=1)


def test_a_model_without_a_trained_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'arith-tiny' is no reward model: its weights lack 'score.weight'"):
        scores(Path("arith-tiny"))


def test_messages_go_through_the_models_own_template_and_text_needs_none(folder: Make) -> None:
    path, plain = folder("llama"), folder("llama", template=False)
    chat = [{"role": "user", "content": "8+8="}]
    assert scores(path, ["16"], prompts=[chat])[0] == pytest.approx(scores(plain, ["16"])[0])
    found, report = scores(plain, ["16", "17"], prompts=[chat, "8+8="])
    assert np.isnan(found["16"])
    assert not np.isnan(found["17"])
    assert "has no chat template" in report.failures[0].error


def test_a_text_that_is_too_long_or_empty_has_no_score_and_others_keep_theirs(folder: Make) -> None:
    path = folder("llama")
    found, report = scores(path, ["1", "2" * 60, "2" * 61])
    assert not np.isnan([found["1"], found["2" * 60]]).any()
    assert np.isnan(found["2" * 61])
    (failure,) = report.failures
    assert failure.rows == ("u2_0_0",)
    assert "have 65 tokens, the reward model reads 64" in failure.error
    found, report = scores(path, [""], prompts=[""])
    assert np.isnan(found[""])
    assert "have no tokens" in report.failures[0].error


def test_a_failed_row_of_a_model_can_be_unscored_but_not_dropped() -> None:
    nodes = {
        "rollout": {"use": "rollout.generate", "model": "p", "pool": "a", "engine": "fake", "max_tokens": 8},
        "reward": {"use": "reward.model", "model": "rm", "pool": "b", "on_error": "drop"},
    }
    document = {
        "flowrl": 1, "name": "drops", "models": {"p": {"path": "arith-tiny"}, "rm": {"path": str(TOY)}},
        "data": {"train": {"type": "arithmetic", "size": 8}}, "batch": {"prompts": 2, "group": 2},
        "pools": {"a": {}, "b": {"workers": 2}}, "nodes": nodes,
    }  # fmt: skip
    (problem,) = [problem for problem in flowrl.Pipeline(document).check() if problem.severity == "error"]
    assert (problem.code, problem.fix) == ("FR007", "on_error: fail | unscored")
    assert not [
        p for p in flowrl.Pipeline(document, sets=["nodes.reward.on_error=unscored"]).check() if p.severity == "error"
    ]
