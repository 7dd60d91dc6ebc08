"""Weights on their way to an engine: all of them, tied ones once, bucket by bucket, and nothing that does not fit."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.engine import Request, Sampling, Wanted, engines_of
from flowrl.nodes._backend.loading import Loading
from flowrl.nodes._backend.models import load_model
from flowrl.nodes._backend.trainer import trainer_of
from flowrl.nodes._backend.transport import Receiver, choose, this_process, wanted_dtype
from flowrl.nodes._backend.weights import Bucket, Kind, WeightsError, buckets, cut, named_weights
from flowrl.nodes.rollout.generate import Generate
from flowrl.nodes.sync.weights import Weights

WHOLE = 1 << 40
"""A bucket that holds everything."""


def change(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


def load(parts: Iterator[Bucket], module: torch.nn.Module) -> None:
    loading: Any = None
    for part in parts:
        if part.begins is not None:
            loading = Loading(module, part.begins.manifest)
        loading.load(part)
        if part.ends:
            loading.finish()


def only_bucket(module: torch.nn.Module, dtype: str = "float32", verify: bool = False) -> Bucket:
    (bucket,) = buckets(module, dtype, WHOLE, verify)
    return bucket


def with_arrays(bucket: Bucket, **changed: np.ndarray[Any, Any] | None) -> Bucket:
    """The bucket with some arrays changed, or left out, from the manifest too."""
    arrays = {name: array for name, array in {**bucket.arrays, **changed}.items() if array is not None}
    kinds = {name: Kind(bucket.kinds[name].dtype if name in bucket.kinds else str(array.dtype), array.shape)
             for name, array in arrays.items()}  # fmt: skip
    assert bucket.begins is not None
    return replace(bucket, arrays=arrays, kinds=kinds, begins=replace(bucket.begins, manifest=kinds))


@pytest.fixture
def pair(context: Context) -> tuple[Generate, Weights]:
    """A rollout and a sync on one worker."""
    rollout, sync = Generate(max_tokens=4), Weights(verify=True)
    rollout.setup(context)
    sync.setup(context)
    return rollout, sync


@pytest.mark.parametrize("kind", ["arith-tiny", "gpt2", "qwen2"])
@pytest.mark.parametrize("bucket_bytes", [1, 50_000, WHOLE])
def test_after_a_sync_the_engine_has_the_trained_weights_bit_for_bit(
    kind: str, bucket_bytes: int, context: Context, model_folder: Callable[[str], Path]
) -> None:
    path = kind if kind == "arith-tiny" else str(model_folder(kind))
    spec = ModelSpec(path=path, trainable=True)
    context = replace(context, models={"policy": spec})
    Generate(max_tokens=4).setup(context)
    trained = trainer_of(context).module
    change(trained)
    (engine,) = engines_of(context).values()
    parts = list(buckets(trained, "float32", bucket_bytes, verify=True))
    assert len(parts) > 1 or bucket_bytes == WHOLE
    for part in parts:
        if part.begins is not None:
            engine.begin_update(part.begins)
        engine.load_bucket(part)
    engine.finish_update(3)
    assert engine.version() == 3
    copy = named_weights(engine._model)  # type: ignore[attr-defined]
    for name, weight in named_weights(trained).items():
        assert torch.equal(weight, copy[name])
        assert weight.data_ptr() != copy[name].data_ptr(), "the engine owns its weights"


def test_the_node_sends_and_receives(context: Context, pair: tuple[Generate, Weights]) -> None:
    _, sync = pair
    for part in sync.send([sync.receiver()]):
        sync.receive(part, 3)
    assert [engine.version() for engine in engines_of(context).values()] == [3]


def test_other_ranks_send_nothing_of_a_model_that_is_whole_on_each(context: Context) -> None:
    sync = Weights()
    trainer_of(context)
    sync.setup(replace(context, rank=1, num_ranks=2))
    assert list(sync.send([])) == []


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(4, 1000))
def test_buckets_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    manifest = {f"w{position}": Kind("float32", (size,)) for position, size in enumerate(sizes)}
    parts = cut(manifest, limit)
    assert [name for part in parts for name in part] == list(manifest)
    assert all(parts)
    for part in parts:
        assert sum(manifest[name].num_bytes for name in part) <= limit or len(part) == 1


def test_no_more_than_one_bucket_is_copied_at_a_time() -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    made: list[weakref.ref[Any]] = []
    for part in buckets(model, "bfloat16", 200_000):
        made.append(weakref.ref(next(iter(part.arrays.values()))))
        assert sum(array() is not None for array in made) == 1
    assert len(made) > 5


def test_weights_are_cast_once_on_the_sender(model_folder: Callable[[str], Path]) -> None:
    path = str(model_folder("qwen2"))
    wide, narrow = load_model(ModelSpec(path=path)), load_model(ModelSpec(path=path, dtype="bfloat16"))
    change(wide)
    load(buckets(wide, "bfloat16", 1000, verify=True), narrow)
    for name, weight in named_weights(wide).items():
        assert torch.equal(weight.bfloat16(), named_weights(narrow)[name])


def test_tied_weights_travel_once(model_folder: Callable[[str], Path]) -> None:
    sent = only_bucket(load_model(ModelSpec(path=str(model_folder("qwen2"))))).arrays
    assert "model.embed_tokens.weight" in sent
    assert "lm_head.weight" not in sent


def test_buffers_that_are_saved_travel_too() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)
            self.register_buffer("steps", torch.tensor(7))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)

    bucket = only_bucket(Model(), "float16")
    assert set(bucket.arrays) == {"layer.weight", "layer.bias", "steps"}
    assert bucket.kinds["steps"] == Kind("int64", ())
    assert bucket.kinds["layer.bias"] == Kind("float16", (2,))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"lm_head.weight": None}, "'lm_head.weight' was not sent"),
        ({"base_layer.weight": np.zeros(1, np.float32)}, "'base_layer.weight' was sent, but"),
        ({"lm_head.weight": np.zeros((1, 2), np.float32)}, "'lm_head.weight' is float32"),
    ],
)
def test_a_name_that_does_not_match_is_an_error_and_changes_nothing(
    changed: dict[str, np.ndarray[Any, Any] | None], message: str
) -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    before = {name: weight.clone() for name, weight in named_weights(model).items()}
    good = only_bucket(model)
    doubled = with_arrays(good, **{name: array * 2 for name, array in good.arrays.items()})
    with pytest.raises(WeightsError, match=message):
        load(iter([with_arrays(doubled, **changed)]), model)
    assert all(torch.equal(weight, before[name]) for name, weight in named_weights(model).items())


def test_an_engine_of_another_type_is_an_error() -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    with pytest.raises(WeightsError, match=r"embed_tokens.weight' is float32 .* in the engine, but bfloat16"):
        load(buckets(model, "bfloat16", WHOLE), model)


def test_a_stream_that_lacks_what_it_announced_is_an_error() -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    first, *others = buckets(model, "float32", 200_000)
    with pytest.raises(WeightsError, match="was announced, but has not come"):
        load(iter([first, *others[1:]]), model)


def test_verify_finds_a_tensor_that_was_altered_on_the_way() -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    bucket = only_bucket(model, verify=True)
    array = bucket.arrays["model.norm.weight"].copy()
    array[3] += 1e-6
    with pytest.raises(WeightsError, match=r"'model.norm.weight' differs from the training weight"):
        load(iter([replace(bucket, arrays={**bucket.arrays, "model.norm.weight": array})]), model)


def test_verify_finds_a_tensor_that_was_altered_in_the_engine() -> None:
    model, engine = (load_model(ModelSpec(path="arith-tiny")) for _ in range(2))
    bucket = only_bucket(model, verify=True)
    assert bucket.begins is not None
    loading = Loading(engine, bucket.begins.manifest)
    loading.load(bucket)
    loading.finish()
    named_weights(engine)["lm_head.weight"].data[0, 0] += 1
    with pytest.raises(WeightsError, match=r"'lm_head.weight' differs"):
        loading.finish()


@pytest.mark.parametrize("engine", ["transformers", "fake"])
def test_an_engine_with_a_part_of_its_weights_generates_nothing(engine: Any, context: Context) -> None:
    rollout, sync = Generate(max_tokens=4, engine=engine), Weights(bucket_mib=1)
    rollout.setup(context)
    sync.setup(context)
    first, *others = sync.send([sync.receiver()])
    sync.receive(first, 1)
    (made,) = engines_of(context).values()
    requests, sampling = [Request([3, 4], [0])], Sampling(2, 1.0)
    found: list[int] = []
    thread = Thread(target=lambda: found.append(sum(map(len, made.generate(requests, sampling)))), daemon=True)
    thread.start()
    thread.join(0.2)
    assert not found and made.version() == 0
    for part in others:
        sync.receive(part, 1)
    thread.join(20)
    assert found == [1]


def test_an_engine_that_keeps_its_old_version_is_an_error(
    context: Context, pair: tuple[Generate, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, sync = pair
    (engine,) = engines_of(context).values()
    monkeypatch.setattr(type(engine), "version", lambda self: 4)
    (part,) = sync.send([sync.receiver()])
    with pytest.raises(RuntimeError, match="after the sync an engine has version 4, not 5"):
        sync.receive(part, 5)


def test_read_only_arrays_of_the_object_store_are_taken_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    bucket = only_bucket(model)
    arrays = {name: array.copy() for name, array in bucket.arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    load(iter([replace(bucket, arrays=arrays)]), model)
    assert not recwarn.list


def test_the_transport_follows_from_place_and_engines() -> None:
    cpu, gpu = Wanted("float32"), Wanted("float32", ("shm", "ipc", "nccl"))
    here, there = this_process(), "elsewhere/1"
    assert choose("auto", [Receiver(here, (cpu,))], "cuda:0") == "shm"
    assert choose("auto", [Receiver(here, (gpu,)), Receiver(there, (gpu,))], "cuda:0") == "ipc"
    assert choose("auto", [Receiver(there, (gpu,))], "cuda:0") == "nccl"
    assert choose("auto", [Receiver(there, (gpu,)), Receiver(there, (cpu,))], "cuda:0") == "shm"
    assert choose("auto", [Receiver(there, (gpu, gpu))], "cuda:0") == "shm"
    assert choose("auto", [Receiver(there, (gpu,))], "cpu") == "shm"
    assert choose("shm", [Receiver(there, (gpu,))], "cuda:0") == "shm"
    with pytest.raises(WeightsError, match="by transport nccl, only by shm"):
        choose("nccl", [Receiver(there, (cpu,))], "cuda:0")


def test_engines_of_one_model_hold_one_type() -> None:
    assert wanted_dtype([Receiver("a", (Wanted(), Wanted("bfloat16"))), Receiver("b", ())]) == "bfloat16"
    assert wanted_dtype([Receiver("a", (Wanted(),))]) == ""
    with pytest.raises(WeightsError, match="bfloat16 and float32"):
        wanted_dtype([Receiver("a", (Wanted("bfloat16"), Wanted("float32")))])


@pytest.mark.parametrize(
    ("transport", "generates_on", "accelerators", "refused"),
    [
        ("auto", ["train", "other"], False, ""),
        ("shm", ["train", "other"], False, ""),
        ("nccl", ["other"], None, ""),
        ("nccl", ["other", "train"], None, "a GPU cannot be two ranks"),
        ("ipc", ["train"], True, ""),
        ("ipc", ["train", "other"], None, "on pool 'other'"),
        ("nccl", ["other"], False, "needs GPUs"),
        ("ipc", ["train"], False, "needs GPUs"),
    ],
)
def test_a_transport_is_refused_where_it_leads_nowhere(
    transport: Any, generates_on: list[str], accelerators: bool | None, refused: str
) -> None:
    told = Weights(transport=transport).refuses_placement("train", generates_on, accelerators)
    assert (refused in told) if refused else told == ""
