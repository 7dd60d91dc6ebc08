"""Rewards on real Ray: a reward model on two workers, a judge, and a function of the user's that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runs import Finished, gone

from flowrl.nodes.reward.model import Model

PIPELINE = f"""
flowrl: 1
name: rewards
models:
  policy: {{path: arith-tiny}}
  rm: {{path: {Model.toy_model}}}
data: {{train: {{type: arithmetic, size: 64}}}}
batch: {{prompts: 4, group: 4}}
pools:
  generate: {{workers: 1, cpus_per_worker: 0}}
  scoring: {{workers: 2, cpus_per_worker: 0}}
nodes:
  rollout:
    use: rollout.generate
    model: policy
    pool: generate
    engine: fake
    max_tokens: 8
    script: {{texts: ["1", "22", "333", hang]}}
  model: {{use: reward.model, model: rm, pool: scoring, writes: {{reward: reward_model}}}}
  judge: {{use: reward.judge, url: "fake:Score: 5", writes: {{reward: reward_judge, reward_info: judge_info}}}}
  mine: {{use: reward.function, call: ./mine.py:score, timeout: 1, writes: {{reward: reward_mine}}}}
  reward: {{use: reward.weighted_sum, reads: {{rewards: [reward_model, reward_judge, reward_mine]}}}}
  advantage: {{use: advantage.grpo}}
run: {{steps: 2}}
"""
MINE = """
def score(response, prompt):
    if response == "hang":
        pow(3, 10**9)
    return {"score": len(response), "prompt": prompt}
"""


def test_rewards_of_every_kind_work_together_and_a_bad_row_costs_itself(
    tmp_path: Path, flowrl: Callable[..., Finished]
) -> None:
    (tmp_path / "rewards.yaml").write_text(PIPELINE)
    (tmp_path / "mine.py").write_text(MINE)
    run = flowrl("run", "rewards.yaml")
    assert run.code == 0, run.out + run.err
    assert [line["reward/unscored"] for line in run.metrics] == [4, 4]
    assert {event["worker"] for event in run.events if event["node"] == "model"} == {"scoring/0", "scoring/1"}
    log = (run.run / "log.txt").read_text()
    assert "no answer within 1 s" in log
    assert "u0_3_0" in log
    assert gone(tmp_path)
