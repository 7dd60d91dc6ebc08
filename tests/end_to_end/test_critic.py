"""A critic beside the policy: on the same workers, saved and exported with it; or on workers of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runs import DEFAULT, ROOT, Finished

PIPELINE = f"""
extends: {DEFAULT}
name: critic
models:
  critic: {{path: $base, head: value, trainable: true, optimizer: {{lr: 3.0e-3}}}}
  reference: null
batch: {{prompts: 8, group: 4}}
nodes:
  values: {{use: model.values, model: critic, pool: train}}
  advantage: {{use: "{ROOT / "tests" / "stub_nodes.py"}:Returns"}}
  critic_update: {{use: update.value, model: critic, pool: train, minibatch: 4}}
  actor_update: {{minibatch: 4, kl_coef: 0.0, after_step: 1}}
  ref_logprob: null
tracking: null
checkpoint: {{every: 3}}
run: {{steps: 3, seed: 0}}
"""


def test_two_models_train_on_the_same_workers_and_one_is_exported(
    tmp_path: Path, flowrl: Callable[..., Finished]
) -> None:
    """The policy is copied to both workers, the critic spread over them; the policy begins after the first step."""
    (tmp_path / "critic.yaml").write_text(PIPELINE)
    more = ("--set", "pools.train.workers=2", "--set", "models.critic.parallel=fsdp2")
    run = flowrl("run", "critic.yaml", *more)
    assert run.code == 0, run.out + run.err
    first, *others = run.metrics
    assert first["actor/waiting"] == 1
    assert "actor/loss" not in first
    assert first["critic/explained_variance"] == 0, "a fresh critic says 0 of every token"
    for metrics in others:
        assert "actor/waiting" not in metrics
        assert {"actor/loss", "critic/explained_variance", "critic/grad_norm"} <= metrics.keys()
    versions = {event["step"]: event["version"] for event in run.events if event["node"] == "rollout"}
    assert versions == {1: 0, 2: 0, 3: 1}, "what waits is not synced"
    said = flowrl("export", run.run, "--model", "critic", "-o", "critic")
    assert said.code == 0, said.out + said.err
    assert "critic, head: value` under models:" in said.out
    again = ("--set", "models.critic.path=./critic", "--set", "models.critic.parallel=ddp", "--steps", "1", "--local")
    elsewhere = [f"nodes.{node}.pool=own" for node in ("values", "critic_update")]
    sets = [part for one in ("pools.own={workers: 1}", *elsewhere) for part in ("--set", one)]
    later = flowrl("run", "critic.yaml", *again, *sets, "--set", "name=later")
    assert later.code == 0, later.out + later.err
