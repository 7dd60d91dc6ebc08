"""What an optimizer keeps of each parameter is what torch keeps, and one that nobody knows says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.graph.sizes.measure import measure
from flowrl.graph.sizes.memory import Share
from flowrl.graph.sizes.moments import num_moments
from flowrl.model import OptimizerSpec
from flowrl.nodes._backend.optimizer import make_optimizer
from flowrl.pipeline import load

DEFAULT = Path(__file__).parents[4] / "pipelines" / "grpo_sync.yaml"
OF_TORCH = [
    *(f"torch.optim:{name}" for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam")),
    *("adamw", "torch.optim:RMSprop", "torch.optim:Rprop", "torch.optim:SGD"),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in OF_TORCH]
    + [(kind, {"amsgrad": True}) for kind in ("adamw", "torch.optim:Adam", "torch.optim:AdamW")]
    + [("torch.optim:SGD", {"momentum": 0.9}), ("torch.optim:SGD", {"momentum": 0.0})]
    + [("torch.optim:RMSprop", {"momentum": 0.9, "centered": True}), ("torch.optim:RMSprop", {"centered": True})],
)
def test_so_much_is_kept_of_each_parameter(kind: str, options: dict[str, Any]) -> None:
    module, spec = torch.nn.Linear(5, 7), OptimizerSpec(type=kind, options=options)
    optimizer = make_optimizer(module, spec)
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    num = sum(parameter.numel() for parameter in module.parameters())
    assert num_moments(spec) == sum(value.numel() for value in kept if value.ndim) / num


def shares(kind: str, **options: Any) -> dict[str, Share]:
    found = measure(load(DEFAULT, [f"models.policy.optimizer={ {'type': kind, 'options': options} }"]).plan()).memory[0]
    return {share.what: share for share in found.shares if share.model == "policy" and not share.node}


def test_the_plan_counts_what_is_kept_under_the_optimizer_s_name() -> None:
    num = 661_632
    assert shares("adamw")["AdamW"].num_bytes == 2 * 4 * num
    assert shares("torch.optim:SGD", momentum=0.9)["SGD"].num_bytes == 4 * num
    assert shares("torch.optim:SGD").keys() == {"weights", "gradients", "engine"}


def test_the_plan_says_of_an_unknown_one_that_it_is_not_counted() -> None:
    found = shares("torch.optim:Adafactor")["Adafactor"]
    assert (found.num_bytes, found.how) == (0, "not counted: what it keeps is known once it runs")
