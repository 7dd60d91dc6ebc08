"""`rollout.generate` with the `transformers` engine: exact log-probabilities, seeds, ends, limits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.batch import Batch, Prompt
from flowrl.join import canonical, concat
from flowrl.metrics import collect
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Request, Sampling
from flowrl.nodes._backend.generation import TransformersEngine
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.models import end_tokens, frozen_model
from flowrl.nodes._backend.prefix import sample
from flowrl.nodes.rollout.generate import Generate
from flowrl.rows import Rows

TEXTS = ["1+2=", "41+17=", "9+30=", "8+8="]


def prompts(texts: list[str] = TEXTS, group_size: int = 4) -> Prompt[str]:
    sizes = [group_size] * len(texts)
    return Prompt(Rows([f"u{i}" for i in range(len(texts))], planned=sizes, settled=[0] * len(texts)), texts)


def roll(context: Context, prompt: Prompt[str], **settings: Any) -> Batch:
    node = Generate(**({"max_tokens": 6} | settings))
    node.setup(context)
    types = node.output_ports
    blocks = [out._asdict() for out in node.run(prompt)]
    return concat([Batch(block.pop("rows"), block, {n: p.type for n, p in types.items()}) for block in blocks])


def tokens(batch: Batch, field: str) -> dict[tuple[str, int, int], list[float]]:
    return dict(zip(batch.rows.keys(), (row.tolist() for row in batch.columns[field].jagged), strict=True))  # type: ignore[attr-defined]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["arith-tiny", "gpt2", "qwen2"])
def test_log_probs_equal_those_of_training(
    kind: str, temperature: float, context: Context, model_folder: Callable[[str], Path]
) -> None:
    path = kind if kind == "arith-tiny" else str(model_folder(kind))
    context = replace(context, models={"policy": ModelSpec(path=path)})
    batch = roll(context, prompts(), temperature=temperature, max_tokens=9)
    prompt_ids, response_ids = batch.columns["prompt_ids"], batch.columns["response_ids"]
    with torch.no_grad():
        expected, _ = token_log_probs(frozen_model(context), prompt_ids.jagged, response_ids.jagged, temperature)  # type: ignore[attr-defined]
    assert np.allclose(batch.columns["rollout_log_probs"].values, expected.numpy(), atol=1e-4)


def test_a_session_draws_the_same_tokens_whoever_shares_the_batch(context: Context) -> None:
    together = tokens(roll(context, prompts(group_size=4)), "response_ids")
    fewer = tokens(roll(context, prompts(group_size=2)), "response_ids")
    in_waves = tokens(roll(replace(context, shared={}), prompts(), max_sequences=5), "response_ids")
    assert in_waves == together
    assert all(together[key] == ids for key, ids in fewer.items())
    other_seed = tokens(roll(replace(context, seed=1), prompts(group_size=4)), "response_ids")
    assert other_seed != together


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, -float("inf"), 2.0], [3.0, 0.0, 0.0, 0.0]])
    branch = np.repeat([0, 1], 20_000)
    uniform = np.concatenate([np.random.default_rng(0).random(39_998), [0.0, 1.0 - 1e-12]])
    ids, log_probs = sample(logits, branch, uniform, temperature=2.0)
    for row in (0, 1):
        expected = torch.softmax(logits[row] / 2.0, -1).numpy()
        counts = np.bincount(ids[branch == row], minlength=4) / 20_000
        assert np.allclose(counts, expected, atol=0.015)
    assert np.allclose(log_probs, torch.log_softmax(logits / 2.0, -1).numpy()[branch, ids])


def test_temperature_0_takes_the_likeliest_token_with_its_log_probability_at_1() -> None:
    logits = torch.tensor([[0.0, 1.0, -float("inf"), 2.0], [3.0, 0.0, 3.0, 0.0]])
    ids, log_probs = sample(logits, np.array([0, 1, 0]), np.array([0.0, 0.9, 0.99]), temperature=0.0)
    assert ids.tolist() == [3, 0, 3]
    assert np.allclose(log_probs, torch.log_softmax(logits, -1).numpy()[[0, 1, 0], ids])


def test_a_rollout_at_temperature_0_is_as_one_that_is_nearly_as_cold(context: Context) -> None:
    node = Generate(max_tokens=6).model_copy(update={"temperature": 0.0, "max_tokens": 5})
    node.setup(context)
    blocks = list(node.run(prompts(group_size=2)))
    found = {uid: text for out in blocks for uid, text in zip(out.rows.names(), out.response, strict=True)}
    cold = roll(context, prompts(group_size=2), temperature=1e-3, max_tokens=5)
    assert found == dict(zip(cold.rows.names(), cold.columns["response"], strict=True))
    assert {out.temperature.values[0] for out in blocks} == {1.0}  # what the log-probabilities are of
    assert {out.max_tokens.values[0] for out in blocks} == {5}


def test_broken_weights_are_said_and_not_sampled_from() -> None:
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        sample(torch.tensor([[0.0, float("nan")]]), np.array([0]), np.array([0.5]), temperature=1.0)


def test_the_end_token_belongs_to_the_response_and_nothing_follows(
    context: Context, model_folder: Callable[[str], Path]
) -> None:
    context = replace(context, models={"policy": ModelSpec(path=str(model_folder("qwen2")))})
    batch = roll(context, prompts(group_size=8), max_tokens=12)
    reasons = batch.columns["finish_reason"].values
    assert {"stop", "length"} == set(reasons)
    for ids, reason in zip(batch.columns["response_ids"].jagged, reasons, strict=True):  # type: ignore[attr-defined]
        ends = np.isin(ids, [1, 7])
        assert ends[-1] == (reason == "stop")
        assert not ends[:-1].any()
        assert reason == "stop" or len(ids) == 12


def test_end_tokens_come_from_all_configurations() -> None:
    assert end_tokens([7, 9], 7, None) == [7, 9]
    assert end_tokens(None, None) == []


def test_responses_end_at_the_models_position_limit_and_a_longer_prompt_fails_alone(context: Context) -> None:
    texts = ["1+2=", "7" * 62, "8" * 64]
    with collect() as report:
        batch = canonical(roll(context, prompts(texts, group_size=2), max_tokens=8))
    assert batch.rows.names() == ["u0_0_0", "u0_1_0", "u1_0_0", "u1_1_0"]
    assert batch.columns["response_ids"].lengths[2:].max() <= 2  # type: ignore[attr-defined]
    assert [failure.rows for failure in report.failures] == [("u2_0_0",), ("u2_1_0",)]
    assert "the prompt has 64 tokens" in report.failures[0].error
    by_uid = dict(zip(batch.rows.uids, batch.rows.settled.tolist(), strict=True))
    assert by_uid == {"u0": 2, "u1": 2, "u2": 2}


def test_a_prompt_that_has_no_tokens_fails_alone(context: Context) -> None:
    with collect() as report:
        batch = roll(context, prompts(["1+2=", "你好", "8+8="], group_size=2))
    assert sorted(batch.rows.names()) == ["u0_0_0", "u0_1_0", "u2_0_0", "u2_1_0"]
    (failure,) = report.failures
    assert failure.rows == ("u1_0_0", "u1_1_0")
    assert "vocabulary" in failure.error


def test_a_group_is_yielded_as_soon_as_its_last_session_has_ended(context: Context) -> None:
    engine = TransformersEngine(context.model_spec, "cpu", ChatFormat(), max_sequences=64)
    requests = [Request(ids, [seed * 7 + 1, seed * 7 + 2]) for seed, ids in enumerate(engine.encode(TEXTS * 4))]
    blocks = list(engine.generate(requests, Sampling(max_tokens=8, temperature=3.0)))
    longest = [
        max(len(session.ids) for finished in block for session in finished.sessions)  # type: ignore[union-attr]
        for block in blocks
        if block
    ]
    assert len(longest) > 1
    assert longest == sorted(set(longest))


def test_metrics_measure_all_tokens(context: Context) -> None:
    with collect() as report:
        batch = roll(context, prompts())
    lengths = batch.columns["response_ids"].lengths  # type: ignore[attr-defined]
    assert report.metrics["rollout/tokens"].value == lengths.sum()
    assert report.metrics["rollout/response_length/mean"].value == lengths.mean()
    assert report.metrics["rollout/response_length/max"].value == lengths.max()
    shares = [report.metrics[f"rollout/finish/{reason}"].value for reason in ("stop", "length", "abort")]
    assert sum(shares) == pytest.approx(1.0)


def test_the_chat_template_is_used_once_and_can_be_left_out(
    context: Context, model_folder: Callable[[str], Path]
) -> None:
    from transformers import AutoTokenizer

    folder = model_folder("gpt2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{% for m in messages %}({{ m['content'] }}){% endfor %}="
    tokenizer.save_pretrained(folder)
    spec = ModelSpec(path=str(folder))
    with_template = TransformersEngine(spec, "cpu", ChatFormat(), max_sequences=8)
    without = TransformersEngine(spec, "cpu", ChatFormat(use_template=False), max_sequences=8)
    assert with_template.encode(["1+2"]) == without.encode(["(1+2)="])
