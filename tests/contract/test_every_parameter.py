"""Every parameter of every library node matters: two values of it differ in what the node does, or one is refused.

`SAID` lists the parameters that the tests below speak of. One that is in no list fails the first test.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import flowrl
from flowrl.batch import Batch, Token
from flowrl.column import NUMPY_DTYPES, Column, as_array
from flowrl.evaluation import Evaluation
from flowrl.gate import Gate, limits_of
from flowrl.metrics import Report, collect
from flowrl.model import ModelSpec, OptimizerSpec, Settings
from flowrl.node import CYCLE, Context, Node
from flowrl.nodes._backend.chat import ChatTemplateError
from flowrl.nodes._backend.fake import FakeEngine
from flowrl.nodes._backend.loss_choice import LOSSES
from flowrl.nodes._backend.objective import SETTINGS
from flowrl.nodes._backend.script import Script
from flowrl.nodes._backend.terms import Aggregation, KlKind
from flowrl.nodes._backend.updating import Updating
from flowrl.nodes._backend.vllm_start import arguments_of
from flowrl.nodes.reward.model import Model
from flowrl.nodes.sync.weights import Weights
from flowrl.registry import find, library_names
from flowrl.testing import toy_batch, toy_context
from flowrl.testing.compare import values_of
from flowrl.testing.toy import arguments, joined

CLASSES = {name: find(name, Path()).load() for name in library_names()}
Seen = Mapping[tuple[str, ...], Any]
"""What a node did: ("field", name, row), ("metric", name), ("failure", row), ("state", ...) or ("promise", method)."""
SHAPE: Mapping[str, Any] = {"group": 3, "lengths": (2, 4, 3, 5), "nulls": 0}
REQUIRED: Mapping[str, Mapping[str, Any]] = {
    "reward.judge": {"url": "fake:Score: 7"},
    "reward.judge_model": {"engine": "fake"},
    "reward.overlong_penalty": {"buffer": 2},
    "reward.regex": {"pattern": r"\S+"},
    "rollout.generate": {"max_tokens": 4},
    "rollout.greedy": {"max_tokens": 4},
    "update.distill": {"minibatch": 3, "teacher_temperature": 0.5},
    "update.policy": {"minibatch": 3},
    "update.value": {"minibatch": 3},
}
CHAT = "{{ start }}{% for turn in messages %}{{ turn.content }}{% endfor %}+"
"""A chat template that changes prompts, and has a variable."""
POLICIES = ("update.policy", "update.distill")
SAID: set[str] = set()


def says(*parameters: str) -> Callable[[Any], Any]:
    """Marks a test that shows what these parameters do."""
    SAID.update(parameters)
    return lambda test: test


@dataclass(frozen=True)
class Matters:
    """Between two values of a parameter, all else the same, this differs: the beginning of a key of `Seen`."""

    first: Any
    second: Any
    what: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, list[Any]] = field(default_factory=dict)
    """Values of inputs, over again as far as needed."""
    absent: tuple[str, ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    """Of the worker."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Of the model."""


def worker(node: Node, model: Mapping[str, Any], changes: Mapping[str, Any]) -> Context:
    """A worker with the toy model, which moves along the gradient itself: no scale of it is lost."""
    plain = OptimizerSpec(type="torch.optim:SGD", lr=0.1, max_grad_norm=math.inf)
    settings = {"path": node.toy_model, "head": node.head, "trainable": True, "optimizer": plain}
    if node.head == "value":
        settings["path"] = Model.toy_model  # whose head is not 0
    spec = ModelSpec(**{**settings, **model})
    cycle = {CYCLE: changes["cycle"]} if "cycle" in changes else {}
    own = {name: value for name, value in changes.items() if name != "cycle"}
    toy = toy_context(node)
    return Context(**{**vars(toy), "models": {**toy.models, "policy": spec}, "shared": cycle, **own})


def batch_of(node: Node, columns: Mapping[str, list[Any]]) -> Batch:
    """The toy batch of the contract test, with some values replaced; a policy has moved a little from its anchor."""
    batch = toy_batch(node, **SHAPE)
    if node.weights == "updates" and "old_log_probs" in batch.columns:
        columns = {"old_log_probs": anchor(), "importance_weights": [1.0, 0.5, 2.0], **columns}
    return Batch(batch.rows, {name: _filled(one, columns.get(name)) for name, one in batch.columns.items()}, {})


@cache
def anchor() -> list[float]:
    """Log-probabilities near those of the toy model: a loss far from them knows its bounds alone."""
    node = made("model.logprob", {})
    (log_probs,), _ = run(node, Matters(None, None, ""))
    ratios = np.random.default_rng(0).normal(scale=0.4, size=len(log_probs.values))
    found: list[float] = (log_probs.values + ratios).tolist()
    return found


def _filled(column: Column[Any], values: list[Any] | None) -> Column[Any]:
    if values is None:
        return column
    cycle = itertools.islice(itertools.cycle(values), len(column.values))
    dtype = next(one for one, kind in NUMPY_DTYPES.items() if kind == column.values.dtype or one == "json")
    array = as_array(list(cycle), dtype)
    return Token(column.rows, array, column.offsets) if isinstance(column, Token) else type(column)(column.rows, array)


def run(node: Node, case: Matters) -> tuple[Any, Report]:
    """What one call gives, on a worker of its own."""
    context = worker(node, case.model, case.context)
    if isinstance(node, Updating):
        torch.manual_seed(0)
    try:
        node.setup(context)
        with collect() as report:
            result = node.run(**arguments(node, batch_of(node, case.columns), case.absent))  # type: ignore[attr-defined]
            out = joined(node, list(result)) if isinstance(result, Iterator) else result
        return out, report
    finally:
        node.close()


def observed(node: Node, case: Matters) -> Seen:
    """All that one call does, and what the node tells the engine."""
    seen: dict[tuple[str, ...], Any] = {("promise", name): value for name, value in promises(node).items()}
    if case.what.startswith("promise"):
        return seen
    try:
        out, report = run(node, case)
    except Exception as error:
        return seen | {("error",): f"{type(error).__name__}: {error}"}
    seen |= {("field", *key): value for key, value in values_of(node, out).items()}
    seen |= {("metric", name): metric.value for name, metric in report.metrics.items()}
    seen |= {("failure", row): each.error for each in report.failures for row in each.rows}
    return seen | {("state", *key): value for key, value in _flat(node.state())}


def _flat(state: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(state, Mapping):
        for name, value in state.items():
            yield from _flat(value, *path, str(name))
    else:
        yield path, state.numpy().copy() if isinstance(state, torch.Tensor) else state


def promises(node: Node) -> dict[str, Any]:
    """What the engine asks of a node beside its call."""
    found: dict[str, Any] = {
        "needs": node.needs(), "max_staleness": node.max_staleness(), "rows_per_call": node.rows_per_call(),
        "also_reads": node.also_reads(),
        "workers_per_copy": node.workers_per_copy(),
        "refuses_placement": [node.refuses_placement("train", [pool], False) for pool in ("train", "generate")],
    }  # fmt: skip
    if isinstance(node, Gate):
        found["limits"] = limits_of(node)
    if isinstance(node, Evaluation):
        due = [node.due(step, 2, 5) for step in range(6)]
        found |= {"asked": node.asked(), "on": node.on(), "due": due, "when": node.when(2)}
    return found


FOUND: dict[str, Mapping[tuple[str, ...], str]] = {}


def trace(name: str, settings: Mapping[str, Any], case: Matters) -> Mapping[tuple[str, ...], str]:
    """What `observed` finds as text, weights as a digest; the same run is made once."""
    key = repr((name, settings, replace(case, first=None, second=None, settings={}, what=case.what[:7])))
    if key not in FOUND:
        seen = observed(made(name, settings), case)
        FOUND[key] = {
            at: hashlib.blake2b(value.tobytes()).hexdigest() if isinstance(value, np.ndarray) else repr(value)
            for at, value in seen.items()
        }
    return FOUND[key]


def differing(first: Mapping[tuple[str, ...], str], second: Mapping[tuple[str, ...], str]) -> set[str]:
    """The keys, as `field advantages u2_0_0`, whose values differ."""
    return {" ".join(key) for key in {**first, **second} if first.get(key) != second.get(key)}


def made(name: str, settings: Mapping[str, Any]) -> Node:
    return CLASSES[name](**{**REQUIRED.get(name, {}), **settings})


def shows_that_it_matters(name: str, parameter: str, case: Matters) -> None:
    found = differing(*(trace(name, {**case.settings, parameter: one}, case) for one in (case.first, case.second)))
    assert any(key.startswith(case.what) for key in found), sorted(found)[:20]


REWARDS = {"reward": [1.0, 0.0, 0.25]}
RATIOS = {"old_log_probs": [-1.0, -2.0, -0.5, -3.0], "rollout_log_probs": [-2.0, -1.0, -1.5]}
WORDS = {"response": ["so 4 or 5", "5 or 4"], "answer": ["4"]}
VERDICT = {"settings": {"engine": "fake", "script": Script(texts=["Score: 7", "verdict: [3]", "good"])}}
TEMPLATED = {"model": {"chat_template": CHAT}}

CASES: dict[str, list[Matters]] = {
    "advantage.gae.gamma": [Matters(1.0, 0.5, "field advantages"), Matters(1.0, 0.5, "field returns")],
    "advantage.gae.lam": [Matters(0.95, 0.5, "field advantages"), Matters(0.95, 0.5, "field returns")],
    "advantage.gae.whiten": [Matters(True, False, "field advantages")],
    "advantage.grpo.baseline": [Matters("mean", "leave_one_out", "field advantages")],
    "advantage.multi_reward.coefficients": [Matters([1.0, 1.0], [1.0, 3.0], "field advantages")],
    "advantage.multi_reward.whiten": [Matters(False, True, "field advantages")],
    "advantage.reinforce_plus_plus.gamma": [Matters(1.0, 0.5, "field advantages")],
    "advantage.reverse_kl.coef": [Matters(1.0, 2.0, "field advantages")],
    "advantage.reverse_kl.clip": [Matters(20.0, 0.1, "field advantages")],
    "advantage.reverse_kl.reward_coef": [Matters(1.0, 2.0, "field advantages"), Matters(0.0, 1.0, "promise needs")],
    "evaluate.accuracy.dataset": [
        Matters("val", "test", "metric val/test/", absent=("data_source",)), Matters("val", "test", "promise on")
    ],
    "evaluate.accuracy.samples": [Matters(1, 3, "metric val/a/mean@3", columns={"data_source": ["a"]}),
                                  Matters(1, 3, "promise asked")],
    "evaluate.accuracy.temperature": [Matters(None, 0.5, "promise asked")],
    "evaluate.accuracy.max_tokens": [Matters(None, 4, "promise asked")],
    "evaluate.accuracy.max_rows": [Matters(None, 2, "promise on")],
    "evaluate.accuracy.before_training": [Matters(False, True, "promise due")],
    "evaluate.accuracy.at_end": [Matters(False, True, "promise due")],
    "evaluate.accuracy.prefix": [Matters("val", "test", "metric test/")],
    "evaluate.accuracy.threshold": [
        Matters(1.0, 0.2, "metric val/a/pass@1", columns={**REWARDS, "data_source": ["a"]})
    ],
    "evaluate.accuracy.answer_pattern": [
        Matters(None, "([0-9])", "metric val/a/maj@3", {"samples": 3},
                {"reward": [1.0, 0.0, 0.0], "response": ["x1", "y1", "y2"], "data_source": ["a"]})
    ],
    "filter.informative.max_rounds": [Matters(10, 1, "promise limits")],
    "filter.informative.when_short": [
        Matters("fail", "short", "promise limits"), Matters("fail", "skip", "promise limits")
    ],
    "filter.informative.threshold": [Matters(0.5, 0.1, "metric groups/all_right", columns={"reward": [0.3]})],
    "filter.rollout_correction.weighting": [
        *(Matters(a, b, "field importance_weights", {"masking": "token"}, RATIOS)
          for a, b in itertools.combinations(("token", "sequence", "none"), 2))
    ],
    "filter.rollout_correction.max_weight": [Matters(2.0, 1.1, "field importance_weights", columns=RATIOS)],
    "filter.rollout_correction.masking": [
        *(Matters(a, b, "field corrected_mask", {"max_ratio": 3.0} if "none" not in (a, b) else {}, RATIOS)
          for a, b in itertools.combinations(("none", "token", "sequence", "geometric"), 2))
    ],
    "filter.rollout_correction.min_ratio": [
        Matters(0.5, 0.0, "field corrected_mask", {"masking": "token"}, RATIOS)
    ],
    "filter.rollout_correction.max_ratio": [
        Matters(2.0, 5.0, "field corrected_mask", {"masking": "token"}, RATIOS)
    ],
    "filter.rollout_correction.newest_only": [
        Matters(False, True, "field corrected_mask", columns={**RATIOS, "policy_version": [1, 2]})
    ],
    "reward.exact_match.strip": [Matters(True, False, "field reward", columns={"response": ["4 "], "answer": ["4"]})],
    "reward.exact_match.ignore_case": [
        Matters(False, True, "field reward", columns={"response": ["a"], "answer": ["A"]})
    ],
    "reward.kl_penalty.coef": [
        Matters(0.05, 0.1, "field shaped_reward"), Matters(0.05, 0.1, "field token_rewards")
    ],
    "reward.kl_penalty.kl": [
        *(Matters(a, b, "field shaped_reward") for a, b in itertools.combinations(("k1", "k2", "k3", "abs"), 2))
    ],
    "reward.kl_penalty.target": [Matters(None, 6.0, "state coef"), Matters(3.0, 0.01, "state coef")],
    "reward.kl_penalty.horizon": [Matters(10_000, 100, "state coef", {"target": 6.0})],
    "reward.length_penalty.budget": [Matters(1024, 8, "field shaped_reward")],
    "reward.length_penalty.scale": [Matters(0.1, 1.0, "field shaped_reward")],
    "reward.math_verify.places": [
        Matters(6, 1, "field reward", columns={"response": [r"\boxed{0.123}"], "answer": ["0.124"]})
    ],
    "reward.model.output": [Matters("logit", "probability", "field reward", columns=WORDS)],
    "reward.overlong_penalty.buffer": [Matters(8, 4, "field overlong_penalty")],
    "reward.overlong_penalty.factor": [Matters(1.0, 2.0, "field overlong_penalty", {"buffer": 8})],
    "reward.reasoning_gym.answer_tag": [
        Matters(True, False, "field reward", columns={"response": ["<answer>2</answer> of 9"]})
    ],
    "reward.regex.pattern": [Matters("[0-9]", "[a-z]+", "field reward", columns=WORDS)],
    "reward.regex.compare": [
        Matters(True, False, "field reward", columns=WORDS), Matters(True, False, "promise needs")
    ],
    "reward.regex.last": [Matters(True, False, "field reward", {"pattern": "[0-9]"}, WORDS)],
    "reward.regex.strip": [Matters(True, False, "field reward", {"pattern": " [0-9]"}, WORDS)],
    "reward.regex.ignore_case": [
        Matters(False, True, "field reward", columns={"response": ["a"], "answer": ["A"]})
    ],
    "reward.weighted_sum.coefficients": [Matters([1.0, 1.0], [1.0, 3.0], "field reward")],
    "rollout.generate.temperature": [
        Matters(1.0, 0.5, "field rollout_log_probs"), Matters(1.0, 0.5, "field temperature")
    ],
    "sync.weights.transport": [
        Matters("auto", "ipc", "promise refuses_placement"), Matters("ipc", "nccl", "promise refuses_placement")
    ],
    "update.distill.teacher": [Matters("teacher", "tutor", "promise also_reads")],
    "update.distill.teacher_temperature": [Matters(0.5, None, "state weights")],
    "update.distill.distill_coef": [Matters(1.0, 2.0, "state weights")],
    "update.distill.top_k": [Matters(1, 3, "state weights"), Matters(1, None, "state weights")],
    "update.value.clip": [Matters(0.2, math.inf, "state weights"), Matters(0.2, 0.01, "state weights")],
    "update.value.aggregation": [
        *(Matters(a, b, "state weights")
          for a, b in itertools.combinations(("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"), 2))
    ],
}  # fmt: skip

for _name in ("advantage.grpo", "advantage.grpo_passk", "advantage.multi_reward"):
    CASES[f"{_name}.normalize"] = [Matters("std", "none", "field advantages")]
    CASES[f"{_name}.epsilon"] = [Matters(1e-6, 1.0, "field advantages")]
for _name in POLICIES:
    CASES[f"{_name}.kl_coef"] = [Matters(0.1, 0.2, "state weights"), Matters(0.0, 0.1, "promise needs")]
    CASES[f"{_name}.entropy_coef"] = [Matters(0.0, 0.1, "state weights")]
    CASES[f"{_name}.uncorrected_staleness"] = [Matters(2, 0, "promise max_staleness")]
    CASES[f"{_name}.loss"] = [
        Matters(*pair, "state weights", {"aggregation": "seq-mean-token-mean"})
        for pair in itertools.combinations(LOSSES, 2)
    ]
for _name, _poison in (*((name, "advantages") for name in POLICIES), ("update.value", "returns")):
    CASES[f"{_name}.minibatch"] = [Matters(1, 3, "state weights")]
    CASES[f"{_name}.epochs"] = [Matters(1, 2, "state weights")]
    CASES[f"{_name}.shuffle"] = [Matters(False, True, "state weights", {"minibatch": 1}, context={"seed": 1})]
    CASES[f"{_name}.after_step"] = [Matters(0, 1, "state weights", context={"cycle": 1})]
    CASES[f"{_name}.max_skipped"] = [Matters(1, 5, "error", {"minibatch": 1}, {_poison: [math.inf]})]
for _name, _ids, _text in (
    ("rollout.generate", "prompt_ids", "response"), ("rollout.greedy", "greedy_prompt_ids", "greedy_response")
):  # fmt: skip
    CASES[f"{_name}.engine"] = [Matters("transformers", "fake", f"field {_text} ")]
    CASES[f"{_name}.max_tokens"] = [Matters(1, 2, f"field {_text} ")]
    CASES[f"{_name}.stop"] = [Matters((), tuple("0123456789"), f"field {_text} ")]
    CASES[f"{_name}.chat_template"] = [Matters(True, False, f"field {_ids}", **TEMPLATED)]
    CASES[f"{_name}.template_options"] = [Matters({}, {"start": "1+"}, f"field {_ids}", **TEMPLATED)]
    CASES[f"{_name}.script"] = [Matters(Script(), Script(texts=["7"]), f"field {_text} ", {"engine": "fake"})]
    CASES[f"{_name}.tensor_parallel"] = [Matters(1, 2, "promise workers_per_copy", {"engine": "vllm"})]

for _name in ("reward.judge_model", "reward.judge"):

    def _replies(text: str, name: str = _name) -> dict[str, Any]:
        return {"script": Script(texts=[text])} if name == "reward.judge_model" else {"url": f"fake:{text}"}

    CASES[f"{_name}.parse"] = [Matters(None, r"\[(\d)\]", "field reward ", _replies("Score: 7 [3]"))]
    CASES[f"{_name}.choices"] = [
        Matters({"good": 1.0}, {"good": 0.5}, "field reward ", _replies("good")),
        Matters(None, {"good": 0.5}, "field reward ", _replies("good")),
    ]
    CASES[f"{_name}.scale"] = [
        Matters(None, (0, 20), "field reward ", _replies("Score: 7")),
        Matters(None, "none", "field reward ", _replies("Score: 7")),
    ]
CASES["reward.judge.url"] = [Matters("fake:Score: 7", "fake:Score: 8", "field reward ")]
SUMS = {"template": "{response}+2=", "engine": "transformers", "parse": r"(\d)", "scale": "none"}
FROZEN = {"trainable": False}
CASES["reward.judge_model.script"] = [Matters(Script(texts=["Score: 1"]), Script(texts=["Score: 2"]), "field reward ")]
CASES["reward.judge_model.template"] = [
    Matters("{response}+2=", "{response}+3=", "field reward_info", SUMS, model=FROZEN),
    Matters("{response}", "{response}{prompt}", "promise needs"),
]
CASES["reward.judge_model.engine"] = [Matters("transformers", "fake", "f", {**SUMS, "engine": "fake"}, model=FROZEN)]
CASES["reward.judge_model.max_tokens"] = [Matters(1, 4, "field reward_info", SUMS, model=FROZEN)]
CASES["reward.judge_model.temperature"] = [Matters(0.0, 50.0, "field reward_info", SUMS, model=FROZEN)]
CASES["reward.judge_model.template_options"] = [
    Matters({}, {"start": "9+"}, "field reward_info", SUMS, model={**FROZEN, "chat_template": CHAT})
]
SAID.update(CASES)


@pytest.mark.parametrize("parameter", CASES)
def test_two_values_of_a_parameter_differ(parameter: str) -> None:
    name, _, key = parameter.rpartition(".")
    for case in CASES[parameter]:
        shows_that_it_matters(name, key, case)


# Bounds on memory, which change no value: what differs is how often the model is called.
LESS_AT_ONCE = {
    "model.logprob.max_tokens_per_microbatch": Matters(1, 8192, ""),
    "model.values.max_tokens_per_microbatch": Matters(1, 8192, ""),
    "reward.model.max_tokens_per_microbatch": Matters(1, 8192, "", columns=WORDS),
    "update.distill.max_tokens_per_microbatch": Matters(1, 8192, "", {"kl_coef": 0.1, "entropy_coef": 0.1}),
    "update.policy.max_tokens_per_microbatch": Matters(1, 8192, "", {"kl_coef": 0.1, "entropy_coef": 0.1}),
    "update.value.max_tokens_per_microbatch": Matters(1, 8192, ""),
    "rollout.generate.max_sequences": Matters(1, 512, ""),
    "rollout.greedy.max_sequences": Matters(1, 512, ""),
    "reward.judge_model.max_sequences": Matters(1, 512, "", SUMS, model=FROZEN),
}
SAID.update(LESS_AT_ONCE)
KEPT = ("field", "state", "metric", "failure", "error")


@pytest.mark.parametrize("parameter", LESS_AT_ONCE)
def test_a_bound_on_memory_changes_no_value(parameter: str) -> None:
    name, _, key = parameter.rpartition(".")
    case, calls, found = LESS_AT_ONCE[parameter], [], []
    for value in (case.first, case.second):
        count = itertools.count()

        def counted(module: torch.nn.Module, *_: Any, count: Iterator[int] = count) -> None:
            if isinstance(module, torch.nn.Embedding):
                next(count)

        hook = torch.nn.modules.module.register_module_forward_pre_hook(counted)
        try:
            found.append(observed(made(name, {**case.settings, key: value}), case))
        finally:
            hook.remove()
        calls.append(next(count))
    assert calls[0] > calls[1] > 0
    small, large = ({key: value for key, value in seen.items() if key[0] in KEPT} for seen in found)
    assert small.keys() == large.keys() and {key[0] for key in small} & {"field", "state"}
    for at, value in small.items():
        if isinstance(value, np.ndarray) or (at[0] != "state" and isinstance(value, list | float)):
            assert np.allclose(value, large[at], atol=1e-5, equal_nan=True), at
        else:
            assert value == large[at], at


def refusal(name: str, **settings: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        made(name, settings)
    return str(caught.value.errors()[0]["msg"])


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"normalize": "none", "epsilon": 0.1}, "epsilon has no effect with normalize: none")
      for name in ("advantage.grpo", "advantage.grpo_passk", "advantage.multi_reward")),
    ("evaluate.accuracy", {"answer_pattern": "x"}, "answer_pattern has no effect with samples: 1"),
    ("filter.rollout_correction", {"weighting": "none", "masking": "token", "max_weight": 3.0}, "with weighting: none"),
    ("filter.rollout_correction", {"min_ratio": 0.1}, "min_ratio has no effect with masking: none"),
    ("filter.rollout_correction", {"max_ratio": 3.0}, "max_ratio has no effect with masking: none"),
    ("filter.rollout_correction", {"weighting": "none"}, "this corrects nothing"),
    ("reward.kl_penalty", {"horizon": 10}, "horizon has no effect without target"),
    *(("reward.regex", {"compare": False, key: value}, f"{key} has no effect with compare: false")
      for key, value in (("last", False), ("strip", False), ("ignore_case", True))),
    *((name, {"choices": {"a": 1.0}, "scale": (0, 1)}, "a scale does not apply to them")
      for name in ("reward.judge", "reward.judge_model")),
    *((name, {"engine": engine, "script": Script(texts=["2"])}, f"engine '{engine}' has no script")
      for name in ("rollout.generate", "rollout.greedy", "reward.judge_model") for engine in ("transformers", "vllm")),
    *((name, {"engine": engine, "engine_options": {"block_size": 8}}, f"engine '{engine}' has no")
      for name in ("rollout.generate", "rollout.greedy", "reward.judge_model") for engine in ("transformers", "fake")),
    *((name, {"engine": engine, "tensor_parallel": 2}, f"engine '{engine}' has no tensor_parallel")
      for name in ("rollout.generate", "rollout.greedy") for engine in ("transformers", "fake")),
    ("update.policy", {"kl": "k1"}, "kl has no effect with kl_coef: 0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "fact"), REFUSED)
def test_a_setting_that_another_one_switches_off_is_refused(name: str, settings: dict[str, Any], fact: str) -> None:
    assert fact in refusal(name, **settings)


@says(*(f"{name}.kl" for name in POLICIES))
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("first", "second"), itertools.combinations(get_args(KlKind), 2))
def test_each_estimator_of_the_divergence_is_another(name: str, first: str, second: str) -> None:
    case, settings = Matters(None, None, ""), {"kl_coef": 0.1}
    found = differing(*(trace(name, {**settings, "kl": kind}, case) for kind in (first, second)))
    assert any(key.startswith(("state weights", "metric actor/kl_loss")) for key in found)


OWN = """
from torch import Tensor

def mine(log_probs: Tensor, advantages: Tensor, factor: float = 1.0) -> Tensor:
    return -factor * log_probs * advantages
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    """A loss of the user's, with one setting, and a function that any `update.policy` could take for it."""
    (tmp_path / "losses.py").write_text(OWN)
    return f"{tmp_path}/losses.py:mine"


USED = [(loss, key) for loss in LOSSES for key in SETTINGS if key in LOSSES[loss].settings]


@says(*(f"{name}.{key}" for name in POLICIES for key in SETTINGS))
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("loss", "key"), USED)
def test_each_setting_of_a_loss_moves_other_weights(name: str, loss: str, key: str) -> None:
    first, second = {"clip_low": (0.0, 0.3), "clip_high": (0.0, 0.3), "dual_clip": (1.3, 2.0)}.get(key, (1.0, 2.0))
    shows_that_it_matters(name, key, Matters(first, second, "state weights", {"loss": loss}))
    default = LOSSES[loss].settings[key]
    traces = [trace(name, {"loss": loss, key: value}, Matters(None, None, "")) for value in (None, default)]
    assert not differing(*traces), "null is not the default of the loss"


@says(*(f"{name}.aggregation" for name in POLICIES))
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if len(LOSSES[loss].aggregations) > 1])
def test_each_aggregation_of_a_loss_moves_other_weights(name: str, loss: str) -> None:
    chosen = {mode: {"loss": loss, "aggregation": mode} for mode in LOSSES[loss].aggregations}
    found = {mode: trace(name, settings, Matters(None, None, "")) for mode, settings in chosen.items()}
    for first, second in itertools.combinations(found, 2):
        assert any(key.startswith("state weights") for key in differing(found[first], found[second])), (first, second)


@says(*(f"{name}.loss_options" for name in POLICIES))
@pytest.mark.parametrize("name", POLICIES)
def test_the_options_of_a_loss_of_ones_own_move_other_weights(name: str, own: str) -> None:
    shows_that_it_matters(name, "loss_options", Matters({}, {"factor": 2.0}, "state weights", {"loss": own}))


def test_every_setting_that_a_loss_does_not_use_is_refused_before_launch(own: str, tmp_path: Path) -> None:
    values = {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 5.0, "tau_positive": 2.0, "tau_negative": 2.0}
    unused = [(loss, key, value) for loss in (*LOSSES, own) for key, value in values.items() if (loss, key) not in USED]
    unused += [(loss, "loss_options", "{factor: 2.0}") for loss in LOSSES]
    unused += [("geo_mean", "aggregation", mode) for mode in get_args(Aggregation) if mode != "seq-mean-token-mean"]
    assert len(unused) == (len(LOSSES) + 1) * len(SETTINGS) - len(USED) + len(LOSSES) + 3
    lines = [
        f"  n{index}: {{use: update.policy, model: policy, minibatch: 16, loss: {json.dumps(loss)}, {key}: {value}}}"
        for index, (loss, key, value) in enumerate(unused)
    ]
    file = tmp_path / "unused.yaml"
    file.write_text("extends: grpo_sync\nname: unused\nnodes:\n" + "\n".join(lines) + "\n")
    found = {
        problem.place.path.split(".")[1]: problem for problem in flowrl.load(file).check() if problem.code == "FR007"
    }
    assert len(found) == len(unused)
    for index, (loss, key, value) in enumerate(unused):
        problem = found[f"n{index}"]
        assert loss in problem.fact and (key in problem.fact or str(value) in problem.fact), problem.fact
        assert problem.fix and problem.place.line == index + 4, problem


SCRIPTED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "texts": (["0"], ["1"], {}),
    "shuffle": (False, True, {"texts": ["0", "1"]}),
    "seconds": ([0.0], [1.0], {}),
    "tokens_per_second": (None, 1.0, {}),
    "slow": (0.0, 1.0, {"seconds": [1.0]}),
    "slow_factor": (10.0, 20.0, {"seconds": [1.0], "slow": 1.0}),
    "spread": (0.0, 1.0, {"seconds": [1.0]}),
    "fail": (0.0, 1.0, {}),
    "stall": (0.0, 1.0, {}),
    "vocabulary": (None, 5, {}),
}
SAID.update(f"Script.{name}" for name in SCRIPTED)


@pytest.mark.parametrize("parameter", SCRIPTED)
def test_two_values_of_a_setting_of_the_script_differ(parameter: str) -> None:
    first, second, others = SCRIPTED[parameter]
    scripts = [Script(**{**others, parameter: value}) for value in (first, second)]
    told = [(one.sessions(0, range(8), 8, True), FakeEngine(one).encode(["ab"])) for one in scripts]
    assert told[0] != told[1]


def test_a_factor_of_nothing_is_refused() -> None:
    with pytest.raises(ValidationError, match="slow_factor has no effect with slow: 0"):
        Script(slow_factor=2.0)


FUNCTIONS = """
import asyncio

calls, running, most = [], 0, 0

def first(response: str): return {"score": 1.0, "other": 0.5}
def second(response: str): return {"score": 0.0, "other": 0.25}
def either(response):
    calls.append(response)
    return [1.0] * len(response) if isinstance(response, list) else 0.0
async def slow(response: str):
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.01)
    running -= 1
    return 1.0
"""


@says(*(f"reward.function.{name}" for name in ("call", "batch", "batch_size", "concurrency", "reward_key")))
def test_two_values_of_a_setting_of_a_function_differ(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    first, second, either, slow = (f"{tmp_path}/mine.py:{name}" for name in ("first", "second", "either", "slow"))
    shows_that_it_matters("reward.function", "call", Matters(first, second, "field reward "))
    shows_that_it_matters("reward.function", "batch", Matters(False, True, "field reward ", {"call": either}))
    shows_that_it_matters("reward.function", "reward_key", Matters("score", "other", "field reward ", {"call": first}))
    batched = {"call": either, "batch": True}
    shows_that_it_matters("reward.function", "batch_size", Matters(64, 2, "promise rows_per_call", batched))
    shows_that_it_matters("reward.function", "concurrency", Matters(16, 2, "promise rows_per_call", {"call": slow}))
    for limit in (1, 3):
        node = made("reward.function", {"call": slow, "concurrency": limit})
        run(node, Matters(None, None, ""))
        assert node._function.__globals__["most"] == limit  # type: ignore[attr-defined]
    for settings, fact in (
        ({"call": first, "batch_size": 2}, "batch_size has no effect here: it is of batch: true"),
        ({"call": first, "concurrency": 2}, "concurrency has no effect here: it is of an async first()"),
        ({"call": slow, "batch": True, "concurrency": 2}, "it is of an async slow() without batch"),
    ):
        assert fact in refusal("reward.function", **settings)


class Server(ThreadingHTTPServer):
    """A judge that remembers what it was asked; busy until its `num_busy` first requests are over."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.num_busy = self.running = self.most = 0
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with server.lock:
            server.bodies.append(body)
            server.keys.append(self.headers.get("Authorization"))
            server.running += 1
            server.most = max(server.most, server.running)
            state = 503 if len(server.bodies) <= server.num_busy else 200
        time.sleep(0.02)
        with server.lock:
            server.running -= 1
        text = json.dumps({"choices": [{"message": {"content": "Score: 7"}}]}).encode()
        self.send_response(state)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made_one:
        thread = threading.Thread(target=made_one.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made_one
        made_one.shutdown()
        thread.join()


@says(*(f"reward.judge.{name}" for name in ("template", "max_tokens", "temperature", "server_model", "options")))
def test_two_values_of_a_setting_of_a_request_differ(server: Server) -> None:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    changed = {
        "template": "Is {response} right?", "max_tokens": 8, "temperature": 0.5, "server_model": "other",
        "options": {"top_p": 0.5},
    }  # fmt: skip
    asked: list[dict[str, set[Any]]] = []
    for settings in ({}, changed):
        run(made("reward.judge", {"url": url, **settings}), Matters(None, None, ""))
        texts = [{**body, "messages": body["messages"][0]["content"]} for body in server.bodies]
        keys = ("messages", "max_tokens", "temperature", "model", "top_p")
        asked.append({key: {text.get(key) for text in texts} for key in keys})
        server.bodies.clear()
    assert all(asked[0][key].isdisjoint(asked[1][key]) for key in asked[0]), asked
    shows_that_it_matters("reward.judge", "template", Matters("{response}", "{response} {answer}", "promise needs"))


@says(*(f"reward.judge.{name}" for name in ("api_key_env", "concurrency", "retries")))
def test_a_judge_has_a_key_and_limits(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{server.server_port}/v1"
    monkeypatch.setenv("SOME_KEY", "open")
    plain = Matters(None, None, "")
    for name, key in ((None, None), ("SOME_KEY", "Bearer open")):
        server.keys.clear()
        run(made("reward.judge", {"url": url, "api_key_env": name}), plain)
        assert set(server.keys) == {key}
    assert made("reward.judge", {"url": url, "api_key_env": "NO_SUCH_KEY"}).lacks()
    for limit in (1, 3):
        server.most = 0
        run(made("reward.judge", {"url": url, "concurrency": limit}), plain)
        assert server.most == limit
    for retries, num_failed in ((0, 1), (1, 0)):
        server.bodies.clear()
        server.num_busy = 1
        _, report = run(made("reward.judge", {"url": url, "retries": retries}), plain)
        assert len(report.failures) == num_failed


@says("reward.math_verify.seconds")
def test_a_formula_that_explodes_has_so_many_seconds() -> None:
    times = []
    for seconds in (1, 2):
        start = time.monotonic()
        columns = {"response": ["1"] * 8 + [r"\boxed{10^{10^{10}}}"], "answer": ["5"]}
        _, report = run(made("reward.math_verify", {"seconds": seconds}), Matters(None, None, "", columns=columns))
        times.append(time.monotonic() - start)
        assert report.failures[0].error.startswith("TimeoutException")
    assert 1 <= times[0] < times[1] and times[1] >= 2


@says("reward.model.label")
def test_a_label_picks_the_logit_of_a_classifier(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(Model.toy_model, num_labels=3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(Model.toy_model).save_pretrained(tmp_path)
    case = Matters(0, 1, "field reward", columns=WORDS, model={"path": str(tmp_path)})
    shows_that_it_matters("reward.model", "label", case)
    one = observed(made("reward.model", {"label": 1}), Matters(None, None, ""))
    none = observed(made("reward.model", {}), case)
    assert "has one label: leave `label` out" in one["error",] and "has 3 labels" in none["error",]


@says("sync.weights.bucket_mib", "sync.weights.verify")
def test_weights_are_sent_in_buckets_and_with_checksums() -> None:
    rollout = CLASSES["rollout.generate"](max_tokens=2)
    context = worker(rollout, {}, {})
    rollout.setup(context)

    def sent(**settings: Any) -> list[Any]:
        sync = Weights(**settings)
        sync.setup(context)
        return list(sync.send([sync.receiver()]))

    assert len(sent(bucket_mib=1)) > len(sent()) == 1
    assert not any(part.checksums for part in sent())
    assert all(part.checksums for part in sent(verify=True))
    with pytest.raises(Exception, match="cannot take weights by transport nccl"):
        sent(transport="nccl")


VLLM = ("rollout.generate", "rollout.greedy", "reward.judge_model")


@says(*(f"{name}.engine_options" for name in VLLM))
@pytest.mark.parametrize("name", VLLM)
def test_options_of_vllm_go_over_the_arguments_that_are_chosen(name: str) -> None:
    assert "vLLM has no engine option 'blok_size'" in refusal(name, engine="vllm", engine_options={"blok_size": 8})
    node = made(name, {"engine": "vllm", "engine_options": {"block_size": 8, "dtype": "bfloat16"}})
    context = worker(node, {}, {})
    plain, changed = (arguments_of(context, None, 1, options) for options in ({}, node.engine_options))  # type: ignore[attr-defined]
    assert {key for key in changed if changed[key] != plain.get(key)} == {"block_size", "dtype"}


@pytest.mark.parametrize("name", ["rollout.generate", "rollout.greedy", "reward.judge_model"])
def test_options_of_a_template_that_there_is_not_end_the_run(name: str) -> None:
    node = made(name, {"engine": "transformers", "template_options": {"start": "1+"}})
    with pytest.raises(ChatTemplateError, match=r"template_options \(start\) have no effect"):
        run(node, Matters(None, None, "", model=FROZEN))


def parameters() -> dict[str, type[Settings]]:
    """Every parameter of every library node, `Class.name` where it is one of a setting's own settings."""
    found: dict[str, type[Settings]] = {}
    for name, cls in CLASSES.items():
        for key, one in cls.model_fields.items():
            found[f"{name}.{key}"] = cls
            inner = one.annotation
            if inspect.isclass(inner) and issubclass(inner, Settings):
                found |= {f"{inner.__name__}.{part}": inner for part in inner.model_fields}
    return found


def test_something_is_said_of_every_parameter_and_of_no_other() -> None:
    assert set(parameters()) - SAID == set(), "show above what these change"
    assert SAID - set(parameters()) == set(), "there are no such parameters"
    assert len(parameters()) > 130
