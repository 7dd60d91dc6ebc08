"""On-policy distillation of a surer teacher: the divergence falls, over all words and without a reward."""

from __future__ import annotations

from collections.abc import Callable

from runs import ROOT, Finished


def test_the_reverse_divergence_falls_by_half_in_ten_steps(flowrl: Callable[..., Finished]) -> None:
    pipeline = ROOT / "pipelines" / "distill_on_policy.yaml"
    done = flowrl("run", pipeline, "--steps", "10", "--set", "tracking=null", "--set", "checkpoint=null")
    assert done.code == 0, done.out + done.err
    found = [line["distill/reverse_kl"] for line in done.metrics]
    assert len(found) == 10
    assert found[0] > 1.0
    assert found[-1] < found[0] / 2
