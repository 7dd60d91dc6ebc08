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
