"""Weights on their way into the real vLLM: what it generates afterwards, and what it refuses."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.model import LoraSpec, ModelSpec
from flowrl.model_files import ASSETS
from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Aborted, Completion, Request, Sampling
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.lora import training_model
from flowrl.nodes._backend.models import load_model
from flowrl.nodes._backend.vllm_engine import VllmEngine
from flowrl.nodes._backend.vllm_start import make_engine
from flowrl.nodes._backend.weights import Bucket, Kind, Manifest, WeightsError, buckets
from flowrl.rows import Jagged

PROMPTS = [[11, 3, 4 + digit, 7] for digit in range(8)]
GREEDY = Sampling(12, 0.0)
K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def start(spec: ModelSpec, **options: Any) -> VllmEngine:
    made = make_engine(Context(model="policy", models={"policy": spec}), ChatFormat(), None, 1, options)
    assert isinstance(made, VllmEngine)
    return made


@pytest.fixture(scope="module", autouse=True)
def functions_run_in_vllm() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        yield


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    made = start(ModelSpec(path="arith-tiny"))
    yield made
    made.close()


@pytest.fixture
def trained() -> Any:
    """A model with other weights than the engine."""
    return changed(load_model(ModelSpec(path="arith-tiny")))


def changed(model: Any, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def sync(engine: VllmEngine, parts: Iterator[Bucket] | list[Bucket], version: int) -> None:
    for part in parts:
        if part.begins is not None:
            engine.begin_update(part.begins)
        engine.load_bucket(part)
        if part.ends:
            engine.finish_update(version)


def answers(engine: VllmEngine, sampling: Sampling = GREEDY) -> list[Completion]:
    requests = [Request(prompt, [position]) for position, prompt in enumerate(PROMPTS)]
    found = {each.request: each.sessions[0] for block in engine.generate(requests, sampling) for each in block}
    sessions = [found[position] for position in range(len(PROMPTS))]
    assert all(isinstance(session, Completion) for session in sessions), sessions
    return sessions  # type: ignore[return-value]


def greedy(engine: VllmEngine) -> list[list[int]]:
    return [each.ids.tolist() for each in answers(engine)]


def greedy_of(model: Any, num_tokens: list[int]) -> list[list[int]]:
    found = []
    for prompt, length in zip(PROMPTS, num_tokens, strict=True):
        ids = list(prompt)
        for _ in range(length):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


def manifest_with(manifest: Manifest, **kinds: Kind | None) -> dict[str, Kind]:
    return {name: kind for name, kind in {**manifest, **kinds}.items() if kind is not None}


def bucket_with(bucket: Bucket, **arrays: np.ndarray[Any, Any] | None) -> Bucket:
    """The bucket with arrays changed or left out, and its manifest with it."""
    kinds = {name: None if array is None else Kind(str(array.dtype), array.shape) for name, array in arrays.items()}
    assert bucket.begins is not None
    return replace(
        bucket,
        arrays={name: array for name, array in {**bucket.arrays, **arrays}.items() if array is not None},
        kinds=manifest_with(bucket.kinds, **kinds),
        begins=replace(bucket.begins, manifest=manifest_with(bucket.begins.manifest, **kinds)),
    )


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 150_000])
def test_after_a_sync_greedy_outputs_are_the_trainers(engine: VllmEngine, trained: Any, bucket_bytes: int) -> None:
    changed(trained, bucket_bytes)
    before = greedy(engine)
    sync(engine, buckets(trained, "float32", bucket_bytes, verify=True), 7)
    after = answers(engine)
    ids = [each.ids.tolist() for each in after]
    assert ids != before
    assert ids == greedy_of(trained, [len(each) for each in ids])
    assert engine.version() == 7
    assert {int(version) for each in after for version in each.versions} == {7}


def test_adapters_arrive_merged(engine: VllmEngine) -> None:
    model = changed(training_model(ModelSpec(path="arith-tiny", trainable=True, lora=LoraSpec(rank=4))), 5)
    sync(engine, buckets(model, "float32", 150_000, verify=True), 8)
    after = answers(engine)
    ids = [each.ids.tolist() for each in after]
    assert ids == greedy_of(model, [len(each) for each in ids])


def test_what_the_old_weights_had_computed_is_forgotten(engine: VllmEngine, trained: Any) -> None:
    prompt = [3 + position % 12 for position in range(50)]  # longer than a block of the cache
    requests, sampling = [Request(prompt, [0])], Sampling(4, 1.0)
    for version, seed in ((11, 1), (12, 2)):
        sync(engine, buckets(changed(trained, seed), "float32", 1 << 30), version)
        for _ in range(2):  # the second time the prompt is in the cache
            ((finished,),) = [block for block in engine.generate(requests, sampling) if block]
            (session,) = finished.sessions
            assert isinstance(session, Completion)
            ids = session.ids.tolist()
            expected, _ = token_log_probs(
                trained, Jagged.of([prompt], np.int64), Jagged.of([ids], np.int64), 1.0, "none"
            )
            np.testing.assert_allclose(session.log_probs, expected.detach().numpy(), atol=2e-3)


def test_names_that_do_not_match_are_errors_and_the_engine_generates_nothing(engine: VllmEngine, trained: Any) -> None:
    (good,) = buckets(trained, "float32", 1 << 30)
    key = good.arrays[K_PROJ]
    cases = {
        f"the engine's weight '{K_PROJ}' was not sent": {K_PROJ: None},
        "the engine's weight 'model.norm.weight' was not sent": {"model.norm.weight": None},
        "'model.extra.weight' was sent|does not take 'model.extra.weight'": {"model.extra.weight": key.copy()},
        # vLLM's own loader skips a bias that it does not know.
        "'model.layers.1.self_attn.k_proj.bias' was sent, but the engine's model took nothing": {
            "model.layers.1.self_attn.k_proj.bias": key[:, 0].copy()
        },
        f"does not take '{K_PROJ}', float32": {K_PROJ: key[:-1].copy()},
    }
    for message, arrays in cases.items():
        with pytest.raises(WeightsError, match=message):
            sync(engine, [bucket_with(good, **arrays)], 20)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="only a part of its new weights"):
            greedy(engine)
    sync(engine, buckets(trained, "float32", 1 << 30, verify=True), 21)
    assert greedy(engine) == greedy_of(trained, [len(ids) for ids in greedy(engine)])


def test_another_type_is_an_error_and_changes_nothing(engine: VllmEngine, trained: Any) -> None:
    before = greedy(engine)
    with pytest.raises(WeightsError, match="is sent as float16 to an engine that holds float32"):
        sync(engine, buckets(trained, "float16", 1 << 30), 22)
    assert greedy(engine) == before


def test_a_stream_that_lacks_what_it_announced_is_an_error(engine: VllmEngine, trained: Any) -> None:
    first, *others = buckets(trained, "float32", 300_000)
    with pytest.raises(WeightsError, match="was not sent"):
        sync(engine, [first, *others[1:]], 22)


def test_verify_finds_a_tensor_that_was_altered_on_the_way(engine: VllmEngine, trained: Any) -> None:
    (bucket,) = buckets(trained, "float32", 1 << 30, verify=True)
    altered = bucket.arrays[K_PROJ].copy()
    altered[3, 5] += 1e-6
    with pytest.raises(WeightsError, match=f"received as '{K_PROJ}' differs from the training weight"):
        sync(engine, [replace(bucket, arrays={**bucket.arrays, K_PROJ: altered})], 23)


def damage(worker: Any, name: str) -> None:
    """In vLLM's process: let the next reload end with one number wrong, or the kernel's packed copy of it."""
    from flowrl.nodes._backend import shm_transfer

    right = shm_transfer.finalize_layerwise_reload

    def wrong(model: Any, config: Any) -> None:
        right(model, config)
        if not model.layers_reloaded:
            model.layers_reloaded = True  # the first call ends an update that broke off
            return
        layer_name, _, parameter = name.rpartition(".")
        layer = model.get_submodule(layer_name)
        weight = getattr(layer, parameter)
        if weight.numel():
            weight.data.view(-1)[5] += 1e-6
        else:
            packed = layer.cpu_linear
            layer.cpu_linear = lambda x, weight, bias: packed(x, weight, bias) + 1e-6
        shm_transfer.finalize_layerwise_reload = right

    worker.model_runner.get_model().layers_reloaded = False
    shm_transfer.finalize_layerwise_reload = wrong


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ("model.layers.2.input_layernorm.weight", "model.layers.2.input_layernorm.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.1.mlp.gate_up_proj.weight", "model.layers.1.mlp.gate_proj.weight"),
        ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_verify_finds_a_tensor_that_is_another_in_the_model(
    engine: VllmEngine, trained: Any, held: str, named: str
) -> None:
    engine.call(engine._llm.collective_rpc(damage, args=(held,)))
    with pytest.raises(WeightsError, match=f"the engine's weight '{named}' differs"):
        sync(engine, buckets(trained, "float32", 1 << 30, verify=True), 24)
    sync(engine, buckets(trained, "float32", 1 << 30, verify=True), 25)


def test_nothing_of_a_bucket_is_left_behind(engine: VllmEngine, trained: Any) -> None:
    def files() -> set[str]:
        return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}

    before = files()
    sync(engine, buckets(trained, "float32", 150_000), 30)
    assert files() <= before
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not any("memfd:weights" in link for link in links)


def leave_unpacked(worker: Any, wrong: bool) -> None:
    """In vLLM's process: forget to pack tied weights for the other layer."""
    from flowrl.nodes._backend import shm_transfer, vllm_held

    shm_transfer.pack_again = (lambda model, tied: None) if wrong else vllm_held.pack_again


def tied(folder: Path) -> Path:
    """A small model whose embedding makes the logits too, with heads that vLLM has a kernel for."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    for file in (ASSETS / "arith-tiny").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tied_weights_and_another_type(dtype: str, tmp_path: Path) -> None:
    path = str(tied(tmp_path))
    engine = start(ModelSpec(path=path), dtype=dtype)
    try:
        assert engine.wants().dtype == dtype
        trained = changed(load_model(ModelSpec(path=path)))
        sync(engine, buckets(trained, dtype, 20_000, verify=True), 1)
        same = load_model(ModelSpec(path=path, dtype=dtype))  # type: ignore[arg-type]
        same.load_state_dict({name: value.to(same.dtype) for name, value in trained.state_dict().items()})
        found = answers(engine, Sampling(8, 1.0))
        prompts = Jagged.of(PROMPTS, np.int64)
        expected, _ = token_log_probs(same, prompts, Jagged.of([each.ids for each in found], np.int64), 1.0, "none")
        here = np.concatenate([each.log_probs for each in found])
        np.testing.assert_allclose(here, expected.detach().float().numpy(), atol=0.2 if dtype == "bfloat16" else 2e-3)
        # The matrix that makes the logits is a packed copy of the embedding: an old one would be found.
        engine.call(engine._llm.collective_rpc(leave_unpacked, args=(True,)))
        with pytest.raises(WeightsError, match=r"'model.embed_tokens.weight' differs"):
            sync(engine, buckets(changed(trained, 5), dtype, 1 << 30, verify=True), 2)
        engine.call(engine._llm.collective_rpc(leave_unpacked, args=(False,)))
        sync(engine, buckets(trained, dtype, 1 << 30, verify=True), 3)
    finally:
        engine.close()


HOT = Sampling(48, 2.0)
"""Responses of many lengths, up to the budget."""


def served(engine: VllmEngine, first: int, results: dict[int, list[Any]]) -> threading.Thread:
    """A call in a thread of its own: eight prompts of eight sessions."""
    seeds = [range(first + 8 * position, first + 8 * position + 8) for position in range(8)]
    requests = [Request(PROMPTS[position], seeds[position], f"u{first}_{position}") for position in range(8)]

    def run() -> None:
        found = {each.request: each.sessions for block in engine.generate(requests, HOT) for each in block}
        results[first] = [session for position in range(len(PROMPTS)) for session in found[position]]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def wait_for_tokens(engine: VllmEngine, num_tokens: int) -> None:
    """Until a session that runs has so many."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        running = list(engine._llm.output_processor.request_states.values())
        if any(each.detokenizer is not None and each.detokenizer.num_output_tokens() >= num_tokens for each in running):
            return
        time.sleep(0.001)


def test_two_calls_over_two_updates_and_a_sleep_lose_nothing_and_each_span_has_its_log_probabilities(
    engine: VllmEngine,
) -> None:
    models = [changed(load_model(ModelSpec(path="arith-tiny")), seed) for seed in (1, 2, 3)]
    sync(engine, buckets(models[0], "float32", 1 << 30), 31)
    results: dict[int, list[Any]] = {}
    threads = [served(engine, 0, results), served(engine, 1000, results)]
    wait_for_tokens(engine, 3)
    sync(engine, buckets(models[1], "float32", 1 << 30), 32)
    wait_for_tokens(engine, 15)
    engine.sleep()
    threads.append(served(engine, 2000, results))
    time.sleep(0.2)
    sync(engine, buckets(models[2], "float32", 1 << 30), 33)
    time.sleep(0.1)
    assert 2000 not in results, "it sleeps"
    engine.wake()
    for thread in threads:
        thread.join(60)
    done: list[Completion] = [session for first in (0, 1000, 2000) for session in results[first]]
    assert len(done) == 192 and all(isinstance(session, Completion) for session in done)
    spans = {tuple(np.unique(session.versions).tolist()) for session in done}
    assert (31, 32, 33) in spans, spans
    assert all((np.diff(session.versions) >= 0).all() for session in done)
    assert all((session.versions == 33).all() for session in results[2000])
    assert max(len(session.ids) for session in done) == HOT.max_tokens, "of all spans together"
    prompts = Jagged.of([prompt for _ in range(3) for prompt in PROMPTS for _ in range(8)], np.int64)
    responses = Jagged.of([session.ids for session in done], np.int64)
    versions = np.concatenate([session.versions for session in done])
    log_probs = np.concatenate([session.log_probs for session in done])
    for version, model in zip((31, 32, 33), models, strict=True):
        expected, _ = token_log_probs(model, prompts, responses, HOT.temperature)
        difference = np.abs(expected.detach().numpy() - log_probs)
        here = versions == version
        assert difference[here].mean() < 1e-5 and difference[here].max() < 1e-3
        assert difference[~here].mean() > 0.01, "other weights have others"


def test_aborted_requests_end_alone_also_while_the_engine_sleeps(engine: VllmEngine) -> None:
    results: dict[int, list[Any]] = {}
    thread = served(engine, 0, results)
    wait_for_tokens(engine, 2)
    engine.sleep()
    later = served(engine, 3000, results)
    time.sleep(0.3)
    engine.abort(["u0_1", *(f"u3000_{position}" for position in range(8))])
    later.join(30)
    assert all(isinstance(session, Aborted) for session in results[3000])
    engine.wake()
    thread.join(30)
    kinds = [{type(session) for session in results[0][8 * p : 8 * p + 8]} for p in range(8)]
    assert Aborted in kinds[1] and all(kind == {Completion} for p, kind in enumerate(kinds) if p != 1)
    assert len(answers(engine)) == len(PROMPTS)
