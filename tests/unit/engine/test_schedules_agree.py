"""One graph, three schedules: without slack they make the same values, bit for bit, of the same rows in a step."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl
from flowrl.batch import Batch, Prompt, Step
from flowrl.data.stream import PromptStream
from flowrl.engine.call import Call, Receipt
from flowrl.engine.local import LocalCluster
from flowrl.engine.loop import Loop
from flowrl.engine.setup import worker_setups
from flowrl.track.history import History

STUBS = Path(__file__).parents[2] / "stub_nodes.py"
SCHEDULES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "colocate_async": {"mode": "colocate_async", "max_staleness": 0},
    "separate_async": {"mode": "separate_async", "max_staleness": 0},
}
Values = dict[tuple[int, str, str], bytes]
"""By step, field and identity."""


class Watched(LocalCluster):
    """Calls end in another order each time, and whatever they write is noted."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random, self.written = random.Random(seed), dict[tuple[int, str, str], bytes]()

    async def call(
        self, worker: str, call: Call, refs: Sequence[Any], num_outputs: int
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        async for receipt, outputs in super().call(worker, call, refs, num_outputs):
            for output in (each for each in outputs if isinstance(each, Batch)):
                self.note(call.step, output)
            await asyncio.sleep(self.random.random() * 0.003)
            yield receipt, outputs

    def note(self, step: int, batch: Batch) -> None:
        for field, column in batch.columns.items():
            if isinstance(column, Step):
                continue
            names = column.rows.uids if isinstance(column, Prompt) else column.rows.names()
            parts = [*column.jagged] if hasattr(column, "jagged") else column.values
            for name, part in zip(names, parts, strict=True):
                key = (step, field, name)
                value = repr(part.tolist() if hasattr(part, "tolist") else part).encode()
                assert self.written.setdefault(key, value) == value, f"{key} was written twice, in two ways"


def values_of(document: Mapping[str, Any], seed: int) -> tuple[Values, History]:
    plan = flowrl.Pipeline(document).plan()
    workers = [replace(worker, can_kill=False, num_threads=1) for worker in worker_setups(plan, num_cores=2)]
    cluster, history = Watched(seed), History()
    cluster.start(workers)
    prompts = PromptStream(plan.document.data["train"].load(), 0)
    asyncio.run(Loop(plan, workers, cluster, prompts, history).train())
    return cluster.written, history


def document(schedule: str, nodes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    shared = schedule == "colocate_async"
    return {
        "flowrl": 1,
        "name": "agree",
        "models": {
            "policy": {"path": "arith-tiny", "trainable": True, "optimizer": {"lr": 1e-2}},
            "reference": {"path": "arith-tiny"},
            "critic": {"path": "arith-tiny", "trainable": True, "optimizer": {"lr": 1e-2}},
        },
        "data": {"train": {"type": "arithmetic", "size": 64}},
        "batch": {"prompts": 4, "group": 2},
        "pools": {"train": {"workers": 1}, "generate": {"shares": "train"} if shared else {"workers": 1}},
        "schedule": SCHEDULES[schedule],
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 3,
                "script": {"texts": ["1", "23", "4"], "shuffle": True, "seconds": [0.002, 0.0, 0.001]},
            },
            **nodes,
            "sync": {"use": f"{STUBS}:Sync", "model": "policy"},
        },
        "run": {"steps": 3, "prune": True},
        **more,
    }  # fmt: skip


REWARD = {"use": "reward.exact_match"}
OLD = {"use": "model.logprob", "model": "policy", "pool": "train", "writes": {"log_probs": "old_log_probs"}}
REF = {"use": "model.logprob", "model": "reference", "pool": "train", "writes": {"log_probs": "ref_log_probs"}}
UPDATE = {"use": "update.policy", "model": "policy", "pool": "train", "minibatch": 2}
GRAPHS: dict[str, dict[str, Any]] = {
    "chain": {"reward": REWARD, "advantage": {"use": "advantage.grpo"}, "old_logprob": OLD, "update": UPDATE},
    "diamond": {
        "reward": REWARD, "advantage": {"use": "advantage.grpo"}, "old_logprob": OLD, "ref_logprob": REF,
        "update": {**UPDATE, "kl_coef": 0.1},
    },
    "two rewards": {
        "reward": {**REWARD, "writes": {"reward": "right"}},
        "short": {"use": "reward.length_penalty", "reads": {"reward": "right"}, "writes": {"shaped_reward": "brief"}},
        "total": {"use": "reward.weighted_sum", "coefficients": [1.0, 0.5], "reads": {"rewards": ["right", "brief"]}},
        "advantage": {"use": "advantage.grpo"}, "old_logprob": OLD, "update": UPDATE,
    },
    "filter": {
        "length": {"use": f"{STUBS}:Judge", "writes": {"score": "reward"}},
        "informative": {"use": "filter.informative", "gate": "keep"},
        "advantage": {"use": "advantage.grpo"}, "old_logprob": OLD,
        "correction": {"use": "filter.rollout_correction"}, "update": UPDATE,
    },
    "critic": {
        "reward": REWARD, "old_logprob": OLD,
        "values": {**OLD, "model": "critic", "writes": {"log_probs": "values"}},
        "advantage": {"use": f"{STUBS}:Beyond"}, "update": UPDATE,
        "update_critic": {**UPDATE, "model": "critic", "reads": {"old_log_probs": "values"}},
    },
}  # fmt: skip


@pytest.mark.parametrize("graph", GRAPHS)
def test_without_slack_all_schedules_write_the_same_values(graph: str) -> None:
    nodes = GRAPHS[graph]
    expected, history = values_of(document("sync", nodes), 0)
    assert len({step for step, _, _ in expected}) == 3
    assert (graph == "filter") == any(step.get("rollout/given_up/filtered") for step in history.metrics)
    for schedule in ("colocate_async", "separate_async"):
        found, other = values_of(document(schedule, nodes), 1)
        assert found == expected
        losses = [[step["actor/loss"] for step in each.metrics] for each in (history, other)]
        assert losses[0] == losses[1]


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_so_do_graphs_made_at_random(data: st.DataObject) -> None:
    fields = ["value0"]
    nodes: dict[str, Any] = {"value0": {"use": f"{STUBS}:Judge", "writes": {"score": "value0"}}}
    for number in range(1, data.draw(st.integers(1, 4))):
        inputs = data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3, unique=True))
        name = f"value{number}"
        nodes[name] = {"use": f"{STUBS}:Mix", "reads": {"inputs": inputs}, "writes": {"value": name}}
        fields.append(name)
    if data.draw(st.booleans()):
        nodes["gate"] = {
            "use": "filter.informative",
            "gate": "keep",
            "reads": {"reward": data.draw(st.sampled_from(fields))},
        }
    if data.draw(st.booleans()):
        nodes["values"] = {**OLD, "model": "critic", "writes": {"log_probs": "values"}}
        nodes["update_critic"] = {"use": f"{STUBS}:Update", "model": "critic", "pool": "train"}
    nodes["spread"] = {"use": f"{STUBS}:Spread", "reads": {"value": data.draw(st.sampled_from(fields))}}
    nodes["old"] = {"use": f"{STUBS}:Read", "model": "policy", "pool": "train"}
    nodes["update"] = {"use": f"{STUBS}:Update", "model": "policy", "pool": "train"}
    expected, _ = values_of(document("sync", nodes), 0)
    for schedule in ("colocate_async", "separate_async"):
        assert values_of(document(schedule, nodes), 1)[0] == expected
