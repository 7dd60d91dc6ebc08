"""How models are trained: settings that an optimizer does not take, and that do not go together."""

from pathlib import Path

import pytest

from flowrl import load

DEFAULT = Path(__file__).parents[4] / "pipelines" / "grpo_sync.yaml"


@pytest.mark.parametrize(
    ("setting", "fact", "fix"),
    [
        ("optimizer={type: torch.optim:SGDD}", "module 'torch.optim' has no class 'SGDD'", "did you mean 'SGD'?"),
        ("optimizer={type: torch.optin:SGD}", "there is no module 'torch.optin'", "did you mean 'optim'?"),
        ("optimizer={type: nowhere:SGD}", "there is no module 'nowhere'", "install it, or start where it lies"),
        ("optimizer={type: sgd}", "which 'sgd' does not", "adamw, or an import path such as torch.optim:SGD"),
        ("optimizer={options: {amsgrat: true}}", "takes no 'amsgrat'", "did you mean 'amsgrad'?"),
        ("optimizer={options: {params: []}}", "takes no 'params'", ""),
        (
            "optimizer={type: torch.optim:Rprop, weight_decay: 0.1}",
            "'torch.optim:Rprop' takes no weight decay, but 0.1 is asked for",
            "weight_decay: 0.0",
        ),
        ("optimizer={type: torch.optim:LBFGS}", "computes the loss several times in a step", "type: adamw"),
        ("optimizer={type: torch.nn.modules.linear:Linear}", "no optimizer of torch, but derived from Module", "adamw"),
        ("optimizer={options: {lr: 1.0}}", "lr has a key of its own beside options", "lr: ..."),
        ("optimizer={type: torch.optim:SGD, eps: 1.0e-6}", "eps is a setting of adamw", "options: {eps: 1e-06}"),
        ("optimizer={min_lr_rate: 0.1}", "a constant one does not fall", "schedule: cosine"),
        ("optimizer={schedule: linear, min_lr_rate: 1.0}", "min_lr_rate must be below 1", "below 1"),
        ("optimizer={decay_vectors: true}", "decay_vectors has no effect with weight_decay: 0", "weight_decay: 0.01"),
        ("dtype=bfloat16", "bfloat16 is too narrow to train in", "mixed_precision: bfloat16"),
    ],
)
def test_what_an_optimizer_does_not_take_is_refused(setting: str, fact: str, fix: str) -> None:
    (problem,) = load(DEFAULT, [f"models.policy.{setting}"]).check()
    assert problem.severity == "error"
    assert fact in problem.fact
    assert fix in problem.fix


@pytest.mark.parametrize("setting", ["mixed_precision=bfloat16", "gradient_checkpointing=true"])
def test_a_frozen_model_is_not_told_how_to_train(setting: str) -> None:
    (problem,) = load(DEFAULT, [f"models.reference.{setting}"]).check()
    assert "does not train" in problem.fact


@pytest.mark.parametrize(
    "setting",
    [
        "optimizer={type: torch.optim:SGD, lr: 0.1, options: {momentum: 0.9, nesterov: true}}",
        "optimizer={type: torch.optim:Adafactor, options: {d: 2.0}}",
        "optimizer={type: transformers.optimization:Adafactor, options: {scale_parameter: false}}",
        "optimizer={schedule: cosine, warmup_steps: 5, min_lr_rate: 0.1, weight_decay: 0.01, options: {amsgrad: true}}",
        "attn_implementation=flash_attention_2",
        "parallel=fsdp2",
    ],
)
def test_what_an_optimizer_takes_is_fine(setting: str) -> None:
    overrides = [
        f"models.policy.{setting}",
        "models.policy.mixed_precision=bfloat16",
        "models.reference.parallel=fsdp2",
    ]
    assert load(DEFAULT, overrides).check() == ()


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["models.policy.optimizer.warmup_steps=199"], False),
        (["models.policy.optimizer.warmup_steps=200"], True),
        (["models.policy.optimizer.warmup_steps=200", "nodes.actor_update.epochs=2"], False),
        (["models.policy.optimizer.warmup_steps=100", "nodes.actor_update.after_step=50"], True),
        (["models.policy.optimizer.warmup_steps=20", "run.steps=10"], True),
    ],
)
def test_a_warm_up_that_outlasts_the_run_is_warned_of(overrides: list[str], warned: bool) -> None:
    found = load(DEFAULT, overrides).check()
    assert [(one.code, one.severity) for one in found] == [("FR078", "warning")] * warned


def test_an_optimizer_of_a_model_that_does_not_train_is_warned_of() -> None:
    (problem,) = load(DEFAULT, ["models.reference.optimizer.lr=1e-3"]).check()
    assert (problem.code, problem.severity) == ("FR078", "warning")


def test_the_optimizer_of_a_model_that_is_frozen_by_mistake_is_no_second_problem() -> None:
    assert {one.code for one in load(DEFAULT, ["models.policy.trainable=false"]).check()} == {"FR024"}


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["nodes.actor_update.minibatch=32", "nodes.actor_update.epochs=4"], True),
        (["nodes.actor_update.minibatch=16"], False),
        (["nodes.actor_update.minibatch=16", "schedule={mode: separate_async, updates_per_sync: 2}",
          "pools.generate={shares: null, workers: 1}"], True),
    ],
)  # fmt: skip
def test_a_single_mini_batch_has_nothing_to_shuffle(overrides: list[str], warned: bool) -> None:
    found = load(DEFAULT, ["nodes.actor_update.shuffle=true", *overrides]).check()
    assert [(one.code, one.severity) for one in found] == [("FR078", "warning")] * warned


def test_a_gate_on_differing_rewards_has_nothing_to_compare_in_a_group_of_one() -> None:
    overrides = ["nodes.advantage={use: advantage.reinforce_plus_plus}", "batch.group=1"]
    gate = "nodes.informative={use: filter.informative, gate: keep}"
    assert load(DEFAULT, overrides).check() == ()
    assert [one.code for one in load(DEFAULT, [*overrides, gate]).check()] == ["FR062"]
