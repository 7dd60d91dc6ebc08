"""The training state: what goes on from it does to the last bit what would have been done without the interruption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.engine import sharded
from flowrl.engine.states import num_bytes, on_host
from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes._backend.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
IDS = torch.arange(24).reshape(3, 8) % 19


def trainer(lr: float = 1e-3, **schedule: Any) -> Trainer:
    spec = ModelSpec(path="arith-tiny", trainable=True, optimizer=OptimizerSpec(lr=lr, **schedule))
    return Trainer(Context(model="policy", models={"policy": spec}, optimizer_steps={"policy": 10}))


def train(one: Trainer, num_steps: int) -> None:
    for _ in range(num_steps):
        one.step([IDS], lambda model, ids: model(input_ids=ids).logits.float().pow(2).mean())


def through_the_disk(state: dict[str, Any], folder: Path, own: dict[str, Any]) -> dict[str, Any]:
    sharded.write(folder, on_host(state), 0, None)
    found: dict[str, Any] = sharded.read(folder, own)
    return found


def same(one: Trainer, two: Trainer) -> bool:
    first, second = one.state(), two.state()
    gathered = [list(state["optimizer"]["state"].values()) for state in (first, second)]
    assert [list(one) for one in gathered[0]] == [list(one) for one in gathered[1]]
    pairs = [*zip(first["weights"].values(), second["weights"].values(), strict=True)]
    pairs += [(a[key], b[key]) for a, b in zip(*gathered, strict=True) for key in a]
    return all(torch.equal(a, b) for a, b in pairs)


def test_training_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    one, two = trainer(), trainer()
    train(one, 3)
    state = one.state()
    assert num_bytes(state) == pytest.approx(3 * 4 * 661_632, rel=0.01)
    two.load_state(through_the_disk(state, tmp_path / "x", two.state()))
    assert same(one, two)
    train(one, 2)
    train(two, 2)
    assert same(one, two)


def test_a_copy_on_the_host_is_not_changed_by_what_is_trained_next(tmp_path: Path) -> None:
    one, two, three = trainer(), trainer(), trainer()
    train(one, 1)
    train(two, 1)
    copied = on_host(one.state())
    train(one, 2)
    three.load_state(through_the_disk(copied, tmp_path / "x", three.state()))
    assert same(two, three)


def test_looking_at_an_optimizer_that_was_never_stepped_changes_nothing(tmp_path: Path) -> None:
    one, two, three = trainer(), trainer(), trainer()
    state = one.state()
    three.load_state(through_the_disk(state, tmp_path / "x", three.state()))
    for each in (one, two, three):
        train(each, 1)
    assert same(one, two)
    assert same(two, three)


def test_another_learning_rate_of_the_document_is_meant(tmp_path: Path) -> None:
    one, two = trainer(1e-3), trainer(5e-4)
    train(one, 2)
    two.load_state(through_the_disk(one.state(), tmp_path / "x", two.state()))
    assert same(one, two)
    assert two.learning_rate == 5e-4


def test_an_optimizer_of_another_kind_starts_anew_with_the_trained_weights(tmp_path: Path) -> None:
    one, two = trainer(), trainer()
    two.optimizer = torch.optim.RMSprop(two.module.parameters(), lr=1e-3)
    train(one, 2)
    two.load_state(through_the_disk(one.state(), tmp_path / "x", two.state()))
    assert torch.equal(next(one.module.parameters()), next(two.module.parameters()))
    assert not two.optimizer.state


def test_a_schedule_goes_on_where_it_was_with_the_rates_of_the_document(tmp_path: Path) -> None:
    one, two, other = (trainer(lr, schedule="linear", warmup_steps=5) for lr in (1e-3, 1e-3, 2e-3))
    train(one, 3)
    for each in (two, other):
        each.load_state(through_the_disk(one.state(), tmp_path / str(id(each)), each.state()))
    assert two.learning_rate == one.learning_rate > 0
    assert other.learning_rate == pytest.approx(2 * one.learning_rate)
    for each in (one, two):
        train(each, 1)
    assert same(one, two)
    assert two.learning_rate == one.learning_rate


def test_the_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    one = trainer()
    state = one.state()
    lost = {**state, "weights": dict(list(state["weights"].items())[1:])}
    with pytest.raises(ValueError, match="of another model: it lacks 1 weights, the first is"):
        one.load_state(lost)
    strange = {**state, "weights": {**state["weights"], "model.more": torch.ones(1)}}
    with pytest.raises(ValueError, match=r"this one has no weight 'model\.more'"):
        one.load_state(strange)
    name, weight = next(iter(state["weights"].items()))
    wide = {**state, "weights": {**state["weights"], name: torch.cat([weight, weight])}}
    with pytest.raises(ValueError, match="of another model: size mismatch"):
        one.load_state(wide)


def test_any_structure_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {"a": {1: torch.ones(2), "b.c": (torch.zeros(3), None, "x")}, "empty": {}, "list": [1, [torch.tensor(4.0)]]}
    found = through_the_disk(state, tmp_path / "x", {})
    assert str(found) == str(state)
