"""A training step in one process, without an engine: rollout, reward, log-probabilities, advantages, update, sync."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.batch import Batch, Prompt
from flowrl.join import concat
from flowrl.metrics import collect
from flowrl.model import ModelSpec, OptimizerSpec
from flowrl.node import Context
from flowrl.nodes._backend.engine import engines_of
from flowrl.nodes._backend.trainer import trainer_of
from flowrl.nodes._backend.weights import named_weights
from flowrl.nodes.advantage.grpo import Grpo
from flowrl.nodes.model.logprob import Logprob
from flowrl.nodes.reward.exact_match import ExactMatch
from flowrl.nodes.rollout.generate import Generate
from flowrl.nodes.sync.weights import Weights
from flowrl.nodes.update.policy import Policy
from flowrl.rows import Rows


class Steps:
    """Training steps by hand."""

    def __init__(self, temperature: float, num_prompts: int = 16, group_size: int = 8) -> None:
        spec = ModelSpec(path="arith-tiny", trainable=True, optimizer=OptimizerSpec(lr=3e-4))
        reference = ModelSpec(path="arith-tiny")
        self.context = Context(model="policy", models={"policy": spec, "reference": reference})
        self.rollout = Generate(max_tokens=8, temperature=temperature)
        self.old_logprob, self.ref_logprob = Logprob(), Logprob()
        self.update = Policy(minibatch=num_prompts // 2, kl_coef=0.001)
        self.sync = Weights(verify=True)
        for node in (self.rollout, self.old_logprob, self.update, self.sync):
            node.setup(self.context)
        self.ref_logprob.setup(replace(self.context, model="reference"))
        self.random = np.random.default_rng(0)
        self.num_prompts, self.group_size = num_prompts, group_size

    def prompts(self, step: int) -> tuple[Prompt[str], Prompt[str]]:
        terms = self.random.integers(0, 50, (self.num_prompts, 2)).tolist()
        sizes = [self.group_size] * self.num_prompts
        rows = Rows([f"u{step}-{i}" for i in range(len(terms))], planned=sizes, settled=[0] * len(terms))
        return Prompt(rows, [f"{a}+{b}=" for a, b in terms]), Prompt(rows, [str(a + b) for a, b in terms])

    def run(self, step: int) -> tuple[dict[str, Any], dict[str, float]]:
        prompt, answer = self.prompts(step)
        with collect() as report:
            blocks = [out._asdict() for out in self.rollout.run(prompt)]
            types = {name: port.type for name, port in Generate.output_ports.items()}
            made = dict(concat([Batch(block.pop("rows"), block, types) for block in blocks]).columns)
            ids = {name: made[name] for name in ("prompt_ids", "response_ids", "temperature")}
            old = self.old_logprob.run(**ids).log_probs
            ref = self.ref_logprob.run(**ids).log_probs
            reward = ExactMatch().run(made["response"], answer).reward
            advantages, loss_mask = Grpo().run(reward, made["response_mask"])
            self.update.run(
                **ids,
                loss_mask=loss_mask,
                advantages=advantages,
                old_log_probs=old,
                ref_log_probs=ref,
                rollout_log_probs=made["rollout_log_probs"],
            )
            for part in self.sync.send([self.sync.receiver()]):
                self.sync.receive(part, step + 1)
        values = {name: metric.value for name, metric in report.metrics.items()}
        return made | {"old_log_probs": old, "ref_log_probs": ref, "reward": reward}, values


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_is_one_before_the_update_and_weights_are_equal_after_the_sync(temperature: float) -> None:
    steps = Steps(temperature)
    for step in range(2):
        fields, metrics = steps.run(step)
        assert np.allclose(fields["old_log_probs"].values, fields["rollout_log_probs"].values, atol=1e-4)
        assert set(fields["policy_version"].values) == {step}
        assert metrics["mismatch/log_ratio"] < 1e-4
        (engine,) = engines_of(steps.context).values()
        trained, copy = trainer_of(steps.context).module, engine._model  # type: ignore[attr-defined]
        for name, weight in named_weights(trained).items():
            assert torch.equal(weight, named_weights(copy)[name])
        if step == 0:
            assert np.array_equal(fields["ref_log_probs"].values, fields["old_log_probs"].values)
    assert not np.array_equal(fields["ref_log_probs"].values, fields["old_log_probs"].values)


def test_a_few_steps_raise_the_reward() -> None:
    steps = Steps(temperature=1.0)
    rewards = [steps.run(step)[1]["reward/mean"] for step in range(8)]
    assert np.mean(rewards[-2:]) > np.mean(rewards[:2]) + 0.1
