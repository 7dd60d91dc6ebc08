"""Weights on their way to the engine: all of them, tied ones once, and nothing that does not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.engine import engines_of
from flowrl.nodes._backend.models import load_model
from flowrl.nodes._backend.trainer import trainer_of
from flowrl.nodes._backend.weights import WeightsError, named_weights, pack, unpack
from flowrl.nodes.rollout.generate import Generate
from flowrl.nodes.sync.weights import Weights


def change(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("kind", ["arith-tiny", "gpt2", "qwen2"])
def test_after_a_sync_the_engine_has_the_trained_weights_bit_for_bit(
    kind: str, context: Context, model_folder: Callable[[str], Path]
) -> None:
    path = kind if kind == "arith-tiny" else str(model_folder(kind))
    spec = ModelSpec(path=path, trainable=True)
    context = replace(context, models={"policy": spec})
    rollout, sync = Generate(max_tokens=4), Weights(verify=True)
    rollout.setup(context)
    sync.setup(context)
    trained = trainer_of(context).module
    change(trained)
    sync.receive(sync.send(), 3)
    (engine,) = engines_of(context).values()
    assert engine.version() == 3
    copy = named_weights(engine._model)  # type: ignore[attr-defined]
    for name, weight in named_weights(trained).items():
        assert torch.equal(weight, copy[name])
        assert weight.data_ptr() != copy[name].data_ptr(), "the engine owns its weights"


def test_weights_are_cast_once_on_the_sender(model_folder: Callable[[str], Path]) -> None:
    path = str(model_folder("qwen2"))
    wide, narrow = load_model(ModelSpec(path=path)), load_model(ModelSpec(path=path, dtype="bfloat16"))
    change(wide)
    unpack(pack(wide, "bfloat16"), narrow)
    for name, weight in named_weights(wide).items():
        assert torch.equal(weight.bfloat16(), named_weights(narrow)[name])


def test_tied_weights_travel_once(model_folder: Callable[[str], Path]) -> None:
    model = load_model(ModelSpec(path=str(model_folder("qwen2"))))
    sent = pack(model, "float32").arrays
    assert "model.embed_tokens.weight" in sent
    assert "lm_head.weight" not in sent


def test_a_name_that_does_not_match_is_an_error_and_changes_nothing() -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    before = {name: weight.clone() for name, weight in named_weights(model).items()}
    good = pack(model, "float32")
    doubled = {name: array * 2 for name, array in good.arrays.items()}
    missing = {name: array for name, array in doubled.items() if name != "lm_head.weight"}
    unknown = doubled | {"base_layer.weight": np.zeros(1)}
    reshaped = doubled | {"lm_head.weight": np.zeros((1, 2), np.float32)}
    for arrays, message in (
        (missing, "'lm_head.weight' was not sent"),
        (unknown, "'base_layer.weight' was sent, but"),
        (reshaped, "'lm_head.weight' is torch.float32"),
    ):
        with pytest.raises(WeightsError, match=message):
            unpack(replace(good, arrays=arrays), model)
    assert all(torch.equal(weight, before[name]) for name, weight in named_weights(model).items())


def test_verify_finds_weights_that_differ(context: Context) -> None:
    rollout, sync = Generate(max_tokens=4), Weights(verify=True)
    rollout.setup(context)
    sync.setup(context)
    sent = replace(sync.send(), checksum="0" * 32)
    with pytest.raises(RuntimeError, match="differ from the training weights"):
        sync.receive(sent, 1)
    assert [engine.version() for engine in engines_of(context).values()] == [0]


def test_read_only_arrays_of_the_object_store_are_taken_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    model = load_model(ModelSpec(path="arith-tiny"))
    sent = pack(model, "float32")
    arrays = {name: array.copy() for name, array in sent.arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    unpack(replace(sent, arrays=arrays), model)
    assert not recwarn.list
