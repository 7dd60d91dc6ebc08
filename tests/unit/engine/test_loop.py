"""The loop on workers of this process that are slow in turn: nothing is lost, whatever order things arrive in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import flowrl
from flowrl import Context, Node, Token, metric
from flowrl.data.stream import PromptStream
from flowrl.engine.call import Call, Receipt
from flowrl.engine.local import LocalCluster
from flowrl.engine.loop import Loop
from flowrl.engine.setup import worker_setups
from flowrl.errors import RunError
from flowrl.track.history import History

STUBS = Path(__file__).parents[2] / "stub_nodes.py"


class Half(Node):
    """Reads the weights on every rank, each of which answers for its share of the rows."""

    weights = "reads"
    device = "accelerator"
    _context: Context

    class Out(NamedTuple):
        log_probs: Token[float]

    def setup(self, context: Context) -> None:
        self._context = context

    def run(self, response_mask: Token[bool]) -> Out:
        own = np.flatnonzero(np.arange(len(response_mask.rows)) % self._context.num_ranks == self._context.rank)
        share = response_mask.jagged.take(own)
        return self.Out(Token(response_mask.rows.take(own), share.values * -0.5, share.offsets))


class Count(Node):
    """An update that reports how many trajectories reached it."""

    scope = "batch"
    weights = "updates"
    pure = False
    device = "accelerator"

    def run(self, log_probs: Token[float]) -> None:
        metric("rows", float(len(log_probs.rows)), reduce="last")


class Flaky(Node):
    """Goes wrong the first time that it is called."""

    scope = "group"
    _calls: int = 0

    class Out(NamedTuple):
        score: Token[bool]

    def run(self, response_mask: Token[bool]) -> Out:
        self._calls += 1
        if self._calls == 1:
            raise OSError("not yet")
        return self.Out(response_mask)


class Remembers(Node):
    """Counts the rows that it has seen in its life."""

    scope = "group"
    pure = False
    _num_rows: int = 0

    def run(self, response_mask: Token[bool]) -> None:
        self._num_rows += len(response_mask.rows)
        metric("seen", self._num_rows, reduce="max")


class SlowCluster(LocalCluster):
    """Waits before a call, longer on some workers than on others."""

    def __init__(self, seconds: dict[str, float]) -> None:
        super().__init__()
        self.seconds = seconds

    async def call(
        self, worker: str, call: Call, refs: Sequence[Any], num_outputs: int
    ) -> AsyncIterator[tuple[Receipt, list[Any]]]:
        async for item in super().call(worker, call, refs, num_outputs):
            await asyncio.sleep(self.seconds.get(worker, 0.0))
            yield item


def trained(document: dict[str, Any], seconds: dict[str, float]) -> History:
    plan = flowrl.Pipeline(document).plan()
    workers = [replace(worker, can_kill=False) for worker in worker_setups(plan, num_cores=2)]
    cluster, history = SlowCluster(seconds), History()
    cluster.start(workers)
    prompts = PromptStream(plan.document.data["train"].load(), 0)
    asyncio.run(Loop(plan, workers, cluster, prompts, history).train())
    return history


def document(**nodes: dict[str, Any]) -> dict[str, Any]:
    here = f"{Path(__file__)}:"
    own = {name: {**node, "use": node["use"].replace("./", here)} for name, node in nodes.items()}
    return {
        "flowrl": 1,
        "name": "loop",
        "models": {"policy": {"path": "arith-tiny", "trainable": True}},
        "data": {"train": {"type": "arithmetic", "size": 64}},
        "batch": {"prompts": 8, "group": 4},
        "pools": {"train": {"workers": 2}, "generate": {"workers": 2}},
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 4,
                "script": {"seconds": [0.0, 0.02, 0.0, 0.05]},
            },
            "weight_sync": {"use": f"{STUBS}:Sync", "model": "policy"},
            **own,
        },
        "run": {"steps": 3},
    }  # fmt: skip


@pytest.mark.parametrize("slow", ["train/0", "train/1", "generate/0", "generate/1"])
def test_every_row_reaches_the_update_when_blocks_of_slow_and_fast_ranks_cross(slow: str) -> None:
    nodes = document(
        old={"use": "./Half", "model": "policy", "pool": "train"},
        update={"use": "./Count", "model": "policy", "pool": "train"},
    )
    history = trained(nodes, {slow: 0.03})
    assert [step["rows"] for step in history.metrics] == [32.0, 32.0, 32.0]


def test_a_retried_node_is_called_again_with_its_groups() -> None:
    nodes = document(flaky={"use": "./Flaky", "on_error": "retry"})
    del nodes["nodes"]["weight_sync"]
    history = trained(nodes, {})
    assert history.metrics[0]["rows/failed"] == 1
    assert len(history.metrics) == 3


def test_a_node_that_remembers_something_stays_on_one_worker() -> None:
    nodes = document(mine={"use": "./Remembers", "pool": "cpu"})
    del nodes["nodes"]["weight_sync"]
    nodes["pools"]["cpu"] = {"workers": 3}
    history = trained(nodes, {"cpu/0": 0.03})
    assert [step["seen"] for step in history.metrics] == [32.0, 64.0, 96.0]


def test_without_retry_the_run_ends_with_node_worker_and_rows() -> None:
    nodes = document(flaky={"use": "./Flaky"})
    del nodes["nodes"]["weight_sync"]
    with pytest.raises(RunError, match=r"OSError: not yet \(node flaky; worker cpu/0; rows u\d+") as caught:
        trained(nodes, {})
    assert "test_loop.py" in caught.value.details


def test_a_call_that_outlasts_its_timeout_ends_the_run_by_name() -> None:
    nodes = document(flaky={"use": "./Flaky", "on_error": "retry", "timeout": 0.2})
    del nodes["nodes"]["weight_sync"]
    with pytest.raises(RunError, match=r"no end within its timeout of 0.2 s \(node flaky; worker cpu/0; rows u\d+"):
        trained(nodes, {"cpu/0": 2.0})


def test_a_quiet_run_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = document(flaky={"use": "./Flaky", "on_error": "retry"})
    del nodes["nodes"]["weight_sync"]
    nodes["run"] |= {"dir": str(tmp_path)}
    result = flowrl.Pipeline(nodes).run(local=True, quiet=True)
    assert len(result.metrics) == 3
    assert capsys.readouterr().out == ""
