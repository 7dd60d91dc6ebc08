"""The default pipeline with LoRA: it learns, the engine has what the trainer has, the reference stands still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runs import DEFAULT, Finished, finish

LORA = (
    "--set", "models.policy.lora={rank: 8, alpha: 16}", "--set", "models.policy.optimizer.lr=3.0e-3",
    "--set", "nodes.weight_sync.verify=true", "--set", "tracking=null",
)  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    found = finish(tmp_path_factory.mktemp("lora"), "run", DEFAULT, "--steps", "12", *LORA)
    assert found.code == 0, found.out + found.err
    return found


def test_the_reward_rises(done: Finished) -> None:
    rewards = [line["reward/mean"] for line in done.metrics]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


def test_the_engine_has_the_merged_weights_in_every_step(done: Finished) -> None:
    assert len(done.metrics) == 12
    assert max(line["mismatch/log_ratio"] for line in done.metrics) < 1e-4


def test_the_policy_leaves_the_reference_that_is_its_own_base(done: Finished) -> None:
    first, last = done.metrics[0]["actor/kl_loss"], done.metrics[-1]["actor/kl_loss"]
    assert first < last
    assert last > 0.05


def test_two_workers_that_each_have_a_copy_learn_too(flowrl: Callable[..., Finished]) -> None:
    pools = ("--set", "pools.train={workers: 2, cpus_per_worker: 0.5}")
    found = flowrl("run", DEFAULT, "--steps", "3", *LORA, *pools)
    assert found.code == 0, found.out + found.err
    assert max(line["mismatch/log_ratio"] for line in found.metrics) < 1e-4
    assert found.metrics[-1]["actor/kl_loss"] > 0


def test_the_reference_is_on_a_pool_of_its_own_and_has_weights_of_its_own(
    tmp_path: Path, flowrl: Callable[..., Finished]
) -> None:
    away = ("--set", "pools.other={workers: 1, cpus_per_worker: 0.5}", "--set", "nodes.ref_logprob.pool=other",
            "--set", "pools.train.cpus_per_worker=0.5")  # fmt: skip
    plan = flowrl("plan", DEFAULT, *LORA, *away)
    assert "those of policy" not in plan.out
    assert "those of policy, its adapter off" in flowrl("plan", DEFAULT, *LORA).out
    found = flowrl("run", DEFAULT, "--steps", "2", *LORA, *away)
    assert found.code == 0, found.out + found.err
    near = finish(tmp_path / "near", "run", DEFAULT, "--steps", "2", *LORA)
    for one, two in zip(found.metrics, near.metrics, strict=True):
        assert one["actor/kl_loss"] == pytest.approx(two["actor/kl_loss"], rel=1e-3, abs=1e-6)
        assert one["reward/mean"] == two["reward/mean"]
