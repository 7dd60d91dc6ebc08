"""MFU: the operations of an update agree with the plan's, and devices are known by their names."""

from __future__ import annotations

import numpy as np
import pytest

from flowrl.graph.sizes.architecture import Architecture, from_config
from flowrl.graph.sizes.flops import work
from flowrl.graph.sizes.lengths import Lengths
from flowrl.metrics import collect
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.models import load_model
from flowrl.nodes._backend.peaks import PEAKS, TERA, peak_of
from flowrl.nodes._backend.utilization import update_flops, utilization
from flowrl.rows import Jagged


def rows(num_prompts: int, group: int, prompt: int, response: int) -> tuple[Jagged, Jagged]:
    prompts = [np.full(prompt, index) for index in range(num_prompts) for _ in range(group)]
    return Jagged.of(prompts), Jagged.of([np.zeros(response, dtype=np.int64)] * (num_prompts * group))


def test_operations_are_those_that_the_plan_counts() -> None:
    model = load_model(ModelSpec(path="arith-tiny", trainable=True), "cpu")
    architecture = from_config(model.config.to_dict())
    assert isinstance(architecture, Architecture)
    planned = work("update", "policy", architecture, 3, 12, Lengths(5, 7), 3)
    assert update_flops(model, *rows(3, 4, 5, 7)) == pytest.approx(planned.flops)


def test_weights_that_do_not_train_need_no_gradient() -> None:
    model = load_model(ModelSpec(path="arith-tiny", trainable=True), "cpu")
    whole = update_flops(model, *rows(1, 2, 3, 4))
    model.requires_grad_(False)
    assert update_flops(model, *rows(1, 2, 3, 4)) == pytest.approx(whole * 2 / 3)


def test_on_a_cpu_nothing_is_reported() -> None:
    model = load_model(ModelSpec(path="arith-tiny", trainable=True), "cpu")
    with collect() as report, utilization(Context(), model, *rows(1, 2, 3, 4)):
        pass
    assert report.metrics == {}


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_a_device_is_known_by_its_name(device: str, name: str) -> None:
    assert peak_of(device) == PEAKS[name] * TERA


def test_a_device_that_is_not_listed_has_no_peak() -> None:
    assert peak_of("NVIDIA GeForce GTX 1080") is None
