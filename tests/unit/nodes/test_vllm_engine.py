"""Rollouts by the real vLLM on a CPU: ids, log-probabilities, ends, seeds, limits, and prompts that fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from flowrl.batch import Json, Prompt
from flowrl.metrics import collect
from flowrl.model import ModelSpec
from flowrl.model_files import ASSETS
from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Completion, Request, Sampling, seed_of
from flowrl.nodes._backend.generation import TransformersEngine
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.models import load_model, load_tokenizer
from flowrl.nodes._backend.vllm_engine import VllmEngine
from flowrl.nodes._backend.vllm_start import make_engine
from flowrl.nodes.rollout.generate import Generate
from flowrl.rows import Jagged, Rows

MAX_LENGTH = 64
SUMS = [f"{a}+{b}=" for a in range(8) for b in range(4)]


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return ModelSpec(path="arith-tiny")


@pytest.fixture(scope="module")
def engine(spec: ModelSpec) -> Iterator[VllmEngine]:
    """One vLLM for all tests of this module."""
    made = make_engine(Context(model="policy", models={"policy": spec}), ChatFormat(), None, 1, {})
    yield made
    made.close()


def requests_of(prompts: Sequence[Sequence[int]], group: int = 4, seed: int = 0) -> list[Request]:
    return [Request(ids, [seed_of(seed, f"u{i}", s) for s in range(group)]) for i, ids in enumerate(prompts)]


def sessions(engine: VllmEngine, requests: Sequence[Request], sampling: Sampling) -> list[Completion | Exception]:
    """All sessions in the order of their requests."""
    found = {each.request: each.sessions for block in engine.generate(requests, sampling) for each in block}
    assert sorted(found) == list(range(len(requests)))
    return [session for position in sorted(found) for session in found[position]]


def done(engine: VllmEngine, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    found = sessions(engine, requests, sampling)
    assert all(isinstance(each, Completion) for each in found), found
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_the_trainer(engine: VllmEngine, spec: ModelSpec, temperature: float) -> None:
    prompts = engine.encode(SUMS)
    got = done(engine, requests_of(prompts), Sampling(8, temperature))
    assert len(got) == 128
    repeated = Jagged.of([ids for ids in prompts for _ in range(4)], np.int64)
    expected, _ = token_log_probs(load_model(spec), repeated, Jagged.of([c.ids for c in got], np.int64), temperature)
    difference = np.abs(expected.detach().numpy() - np.concatenate([c.log_probs for c in got]))
    assert difference.mean() < 1e-5 and difference.max() < 1e-3


def test_temperature_0_answers_every_session_alike_as_the_transformers_engine_does(
    engine: VllmEngine, spec: ModelSpec
) -> None:
    other = TransformersEngine(spec, "cpu", ChatFormat(), 512)
    requests, greedy = requests_of(engine.encode(SUMS), group=3), Sampling(8, 0.0)
    expected = {each.request: each.sessions for block in other.generate(requests, greedy) for each in block}
    got = done(engine, requests, greedy)
    for position, completion in enumerate(got):
        same = expected[position // 3][position % 3]
        assert isinstance(same, Completion)
        assert (completion.text, completion.ids.tolist()) == (same.text, same.ids.tolist())
        assert np.allclose(completion.log_probs, same.log_probs, atol=1e-3)


def test_greedy_answers_are_those_of_the_transformers_engine(engine: VllmEngine, spec: ModelSpec) -> None:
    cold = Sampling(8, 0.01)  # so cold that chance has no say
    other = TransformersEngine(spec, "cpu", ChatFormat(), 512)
    requests = requests_of(engine.encode(SUMS), group=1)
    mine, theirs = done(engine, requests, cold), done(other, requests, cold)  # type: ignore[arg-type]
    sure = [(a, b) for a, b in zip(mine, theirs, strict=True) if min(a.log_probs.min(), b.log_probs.min()) > -0.01]
    assert len(sure) > 24  # of 32: of the others two answers are about equally likely
    for a, b in sure:
        assert a.ids.tolist() == b.ids.tolist()
        assert (a.text, a.finish_reason) == (b.text, b.finish_reason)


def test_a_session_depends_on_its_seed_alone(engine: VllmEngine) -> None:
    requests, sampling = requests_of(engine.encode(SUMS)), Sampling(8, 1.0)
    first = [each.ids.tolist() for each in done(engine, requests, sampling)]
    again = done(engine, requests, sampling)
    assert [each.ids.tolist() for each in again] == first
    assert [each.ids.tolist() for each in done(engine, requests_of(engine.encode(SUMS), seed=1), sampling)] != first
    fewer = [each.ids.tolist() for each in done(engine, requests[5:9], sampling)]
    assert fewer == first[20:36]
    same_prompt = requests_of([requests[0].prompt] * 16)
    assert len({tuple(each.ids.tolist()) for each in done(engine, same_prompt, Sampling(8, 2.0))}) > 30


def test_the_same_run_has_the_same_last_bits(engine: VllmEngine) -> None:
    requests = requests_of(engine.encode(SUMS), group=8)
    runs = [np.concatenate([c.log_probs for c in done(engine, requests, Sampling(8, 1.0))]) for _ in range(3)]
    assert (runs[0] == runs[1]).all() and (runs[0] == runs[2]).all()


def test_finished_requests_come_before_all_have_ended(engine: VllmEngine) -> None:
    short, long = requests_of(engine.encode(["1+1="] * 8 + ["1"] * 8), group=8)[0::15]
    blocks = list(engine.generate([short, long] * 8, Sampling(48, 0.7)))
    assert len(blocks) > 1
    assert sum(len(block) for block in blocks) == 16


def test_a_response_ends_with_the_models_end_or_when_its_tokens_are_used_up(engine: VllmEngine) -> None:
    end = load_tokenizer(ModelSpec(path="arith-tiny")).eos_token_id
    for each in done(engine, requests_of(engine.encode(SUMS)), Sampling(2, 1.0)):
        assert each.finish_reason == ("stop" if each.ids[-1] == end else "length")
        assert len(each.ids) == len(each.log_probs) == len(each.versions) <= 2
        assert end not in each.ids[:-1]
    assert {len(each.ids) for each in done(engine, requests_of(engine.encode(SUMS)), Sampling(1, 1.0))} == {1}


def test_an_empty_response_is_its_end_token(engine: VllmEngine) -> None:
    got = done(engine, requests_of(engine.encode(["3+4=7", "1+1=2"]), group=32), Sampling(4, 1.0))
    empty = [each for each in got if each.text == ""]
    assert empty and all(each.finish_reason == "stop" and len(each.ids) == 1 for each in empty)


def test_a_stop_text_ends_a_response_that_holds_it(engine: VllmEngine) -> None:
    got = done(engine, requests_of(engine.encode(SUMS), group=8), Sampling(8, 1.5, ("1", "42")))
    stopped = [each for each in got if "1" in each.text or "42" in each.text]
    assert stopped and len(stopped) < len(got)
    for each in stopped:
        assert each.finish_reason == "stop" and each.text.endswith(("1", "42"))
        assert len(each.ids) == len(each.text)  # a token for each character, and none after the stop


@pytest.mark.parametrize(("num_tokens", "room"), [(MAX_LENGTH - 2, 2), (MAX_LENGTH - 1, 1)])
def test_a_prompt_within_the_models_length_gets_what_room_there_is(
    engine: VllmEngine, num_tokens: int, room: int
) -> None:
    (each,) = done(engine, [Request([5] * num_tokens, [1])], Sampling(8, 1.0))
    assert len(each.ids) <= room and (len(each.ids) == room or each.finish_reason == "stop")


@pytest.mark.parametrize(
    ("prompt", "why"),
    [([5] * MAX_LENGTH, "64 tokens, the model takes 64"), ([], "empty"), ([99_999], "vocabulary"), ([-1], "")],
)
def test_a_prompt_that_cannot_be_answered_fails_alone(engine: VllmEngine, prompt: list[int], why: str) -> None:
    good = engine.encode(["1+1="])[0]
    found = sessions(engine, [Request(good, [1, 2]), Request(prompt, [3, 4]), Request(good, [5])], Sampling(4, 1.0))
    assert [isinstance(each, Completion) for each in found] == [True, True, False, False, True]
    assert why in str(found[2])


def test_a_call_that_is_broken_off_or_refused_as_a_whole_does_not_stop_the_next(engine: VllmEngine) -> None:
    requests = requests_of(engine.encode(SUMS))
    for _ in range(3):
        assert len(sessions(engine, [Request([], [1, 2])], Sampling(4, 1.0))) == 2
        assert len(done(engine, requests[:2], Sampling(8, 1.0))) == 8
        next(iter(engine.generate(requests, Sampling(8, 1.0))))
        assert len(done(engine, requests[:2], Sampling(8, 1.0))) == 8


def test_more_prompts_than_fit_in_one_pass_are_answered(engine: VllmEngine) -> None:
    # Read in chunks they would need a random stream that can be rewound, which there is none of on a CPU.
    prompts = [[3 + position % 10] * 60 for position in range(300)]
    assert len(done(engine, requests_of(prompts, group=2), Sampling(2, 1.0))) == 600


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model with two end tokens, of which one also pads, and a template that rewrites history."""
    folder = tmp_path_factory.mktemp("variant")
    shutil.copytree(ASSETS / "arith-tiny", folder, dirs_exist_ok=True)
    tokenizer = load_tokenizer(ModelSpec(path="arith-tiny"))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content if m.role == 'user' or loop.last else '+' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids("1"), tokenizer.eos_token_id]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


def test_two_end_tokens_a_shared_pad_and_prompts_that_fail(variant: Path) -> None:
    spec = ModelSpec(path=str(variant))
    context = Context(node="rollout", model="policy", models={"policy": spec}, num_threads=1)
    node = Generate(engine="vllm", max_tokens=8, engine_options={"max_model_len": 32})
    node.setup(context)
    try:
        prompts: list[Json] = ["1+2=", "9+9=", "1+\ud83d", "4" * 40, [{"role": "user", "content": "20+3="}], "😀"]
        rows = Rows([f"u{i}" for i in range(len(prompts))], planned=[16] * 6, settled=[0] * 6)
        with collect() as report:
            blocks = list(node.run(Prompt(rows, np.array(prompts, dtype=object))))
        got = {uid for block in blocks for uid in np.array(block.rows.uids)[block.rows.group]}
        assert got == {"u0", "u1", "u4"}  # half of a character, a prompt too long and a sign without a token fail alone
        assert {failure.rows[0].split("_")[0] for failure in report.failures} == {"u2", "u3", "u5"}
        one, end = json.loads((variant / "generation_config.json").read_text())["eos_token_id"]
        for block in blocks:
            for row, reason in enumerate(block.finish_reason.values):
                ids = block.response_ids.values[slice(*block.response_ids.offsets[row : row + 2])]
                assert reason == ("stop" if ids[-1] in (one, end) else "length")
                assert not np.isin(ids[:-1], [one, end]).any()
        chat: list[Json] = [[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"},
                             {"role": "user", "content": "3"}]]  # fmt: skip
        with pytest.raises(ValueError, match="rewrites history"):
            list(node.run(Prompt(Rows(["u9"], planned=[1], settled=[0]), np.array([*chat, None], dtype=object)[:1])))
    finally:
        node.close()
