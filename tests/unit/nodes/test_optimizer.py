"""Optimizers by name or import path, groups without decay, and the learning rate over a run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trajectories import trajectories

from flowrl import load
from flowrl.engine.setup import worker_setups
from flowrl.metrics import collect
from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes._backend.optimizer import (
    OptimizerError,
    make_optimizer,
    make_scheduler,
    parameter_groups,
    rate_factor,
)
from flowrl.nodes._backend.trainer import Trainer, trainer_of
from flowrl.nodes.update.policy import Policy

DEFAULT = Path(__file__).parents[3] / "pipelines" / "grpo_sync.yaml"


@pytest.fixture
def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2, bias=False))


def shapes(group: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in group["params"]]


def test_biases_and_norms_do_not_decay(module: torch.nn.Module) -> None:
    decayed, others = make_optimizer(module, OptimizerSpec(weight_decay=0.1)).param_groups
    assert (decayed["weight_decay"], shapes(decayed)) == (0.1, [(4, 3), (2, 4)])
    assert (others["weight_decay"], shapes(others)) == (0.0, [(4,), (4,), (4,)])


def test_all_parameters_decay_when_asked(module: torch.nn.Module) -> None:
    (group,) = make_optimizer(module, OptimizerSpec(weight_decay=0.1, decay_vectors=True)).param_groups
    assert group["weight_decay"] == 0.1
    assert len(group["params"]) == 5


def test_frozen_parameters_are_left_out(module: torch.nn.Module) -> None:
    module[0].requires_grad_(False)  # type: ignore[operator]
    assert [shapes(group) for group in parameter_groups(module, OptimizerSpec())] == [[(2, 4)], [(4,), (4,)]]


def test_settings_and_options_reach_the_optimizer(module: torch.nn.Module) -> None:
    adamw = make_optimizer(module, OptimizerSpec(lr=0.1, betas=(0.8, 0.9), eps=1e-6, options={"amsgrad": True}))
    assert type(adamw) is torch.optim.AdamW
    wanted = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "amsgrad": True, "weight_decay": 0.0}
    assert wanted.items() <= adamw.defaults.items()
    sgd = make_optimizer(module, OptimizerSpec(type="torch.optim:SGD", lr=0.2, options={"momentum": 0.9}))
    assert type(sgd) is torch.optim.SGD
    assert {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.0}.items() <= sgd.defaults.items()


@pytest.mark.parametrize(
    "name",
    ["Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"],
)
def test_every_optimizer_of_torch_that_steps_on_gradients_trains(name: str, module: torch.nn.Module) -> None:
    optimizer = make_optimizer(module, OptimizerSpec(type=f"torch.optim:{name}", lr=0.1))
    before = [parameter.clone() for parameter in module.parameters()]
    module(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"type": "torch.optim:SGD", "options": {"momentun": 0.9}}, "torch.optim:SGD takes no 'momentun'; it takes lr"),
        ({"type": "torch.optim:Rprop", "weight_decay": 0.1}, "takes no 'weight_decay'"),
        ({"type": "torch.optim:LBFGS"}, "computes the loss several times in a step"),
        ({"type": "torch.optim:Muon"}, "cannot be made with .*2D parameters"),
        ({"options": {"foreach": True, "fused": True}}, "cannot be made with"),
        ({"type": "torch.nn:Linear"}, "is no optimizer"),
        ({"type": "torch.optim:SGDD"}, "did you mean 'SGD'"),
    ],
)
def test_an_optimizer_that_cannot_be_made_says_why(spec: dict[str, Any], said: str, module: torch.nn.Module) -> None:
    with pytest.raises(OptimizerError, match=said):
        make_optimizer(module, OptimizerSpec(**spec))


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    num_steps=st.integers(0, 60),
    floor=st.sampled_from([0.0, 0.25]),
)
def test_the_learning_rate_rises_once_then_falls_to_its_floor(
    schedule: Any, warmup: int, num_steps: int, floor: float
) -> None:
    floor *= schedule != "constant"
    spec = OptimizerSpec(lr=0.5, schedule=schedule, warmup_steps=warmup, min_lr_rate=floor)
    factors = [rate_factor(spec, step, num_steps) for step in range(max(num_steps, warmup) + 5)]
    assert all(0 < factor <= 1 for factor in factors[: max(num_steps, 1)])
    assert factors[:warmup] == sorted(factors[:warmup])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert factors[warmup] == 1
    assert factors[-1] == (1 if schedule == "constant" else pytest.approx(floor))


def test_the_learning_rate_by_hand(module: torch.nn.Module) -> None:
    def rates(**settings: Any) -> list[float]:
        spec = OptimizerSpec(lr=0.8, **settings)
        optimizer = make_optimizer(module, spec)
        scheduler = make_scheduler(optimizer, spec, 4)
        found = []
        for _ in range(5):
            found.append(optimizer.param_groups[-1]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    assert rates() == [0.8] * 5
    assert rates(schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    assert rates(schedule="linear", warmup_steps=1) == pytest.approx([0.4, 0.8, 0.8 * 2 / 3, 0.8 / 3, 0.0])
    assert rates(schedule="linear", min_lr_rate=0.5) == pytest.approx([0.8, 0.7, 0.6, 0.5, 0.4])
    assert rates(schedule="cosine") == pytest.approx([0.8, 0.8 * 0.85355339, 0.4, 0.8 * 0.14644661, 0.0])


def test_the_rate_that_is_reported_is_that_of_the_last_step_taken() -> None:
    spec = ModelSpec(path="arith-tiny", trainable=True, optimizer=OptimizerSpec(lr=0.4, schedule="linear"))
    context = Context(model="policy", models={"policy": spec}, optimizer_steps={"policy": 8})
    node, batch = Policy(minibatch=2), trajectories()
    node.setup(context)
    reported = []
    for _ in range(2):
        with collect() as report:
            node.run(**batch.columns)  # type: ignore[arg-type]
        reported.append(report.metrics["actor/lr"].value)
    assert reported == pytest.approx([0.35, 0.25])
    assert trainer_of(context).learning_rate == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("overrides", "num_steps"),
    [
        ([], 200),  # 100 steps of 32 prompts, 16 in a mini-batch
        (["run.steps=7", "nodes.actor_update.epochs=3"], 42),
        (["run.steps=7", "nodes.actor_update.every=2"], 6),
        (["batch.prompts=8", "nodes.actor_update.minibatch=8"], 100),
    ],
)
def test_every_worker_knows_the_optimizer_steps_of_the_run(overrides: list[str], num_steps: int) -> None:
    for setup in worker_setups(load(DEFAULT, overrides).plan(), num_cores=2):
        assert setup.optimizer_steps == {"policy": num_steps}


@pytest.mark.parametrize("asked", [False, True])
def test_layers_are_computed_again_only_where_asked(asked: bool) -> None:
    spec = ModelSpec(path="arith-tiny", trainable=True, gradient_checkpointing=asked)
    trainer = Trainer(Context(model="policy", models={"policy": spec}))
    inside: Any = trainer.module.model.layers[0].mlp  # type: ignore[union-attr, index]
    calls: list[object] = []
    inside.register_forward_pre_hook(lambda *_: calls.append(0))

    def share(model: torch.nn.Module, ids: torch.Tensor) -> Any:
        return model(input_ids=ids, use_cache=False).logits.square().mean()

    trainer.step([torch.arange(3, 9)[None]], share)
    assert len(calls) == 1 + asked
    assert not any(module.training for module in inside.modules())
