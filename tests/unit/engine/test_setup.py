"""From a plan to its workers."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from stub_nodes import document

from flowrl import Pipeline, PipelineError, load
from flowrl.engine.call import NodeSetup
from flowrl.engine.setup import accelerators_here, worker_setups
from flowrl.engine.worker import Worker
from flowrl.launch import rehearse
from flowrl.registry import find

MODELS = {"policy": {"path": "x", "trainable": True}}
NODES = {
    "rollout": {"use": "Rollout", "model": "policy", "pool": "engine"},
    "judge": {"use": "Judge", "timeout": 2.0},
    "old": {"use": "Read", "model": "policy", "pool": "train"},
    "update": {"use": "Update", "model": "policy", "pool": "train", "minibatch": 2},
    "sync": {"use": "Sync", "model": "policy"},
}
PLAN = Pipeline(document(NODES, models=MODELS, pools={"train": {"workers": 2}, "engine": {}}, run={"seed": 5})).plan()


def test_each_worker_gets_the_nodes_of_its_pool() -> None:
    workers = {worker.name: [node.name for node in worker.nodes] for worker in worker_setups(PLAN, num_cores=8)}
    assert workers == {
        "cpu/0": ["judge"],
        "engine/0": ["rollout", "sync"],
        "train/0": ["old", "update", "sync"],
        "train/1": ["old", "update", "sync"],
    }


def test_cores_are_shared_out_between_the_workers_that_compute_with_models() -> None:
    threads = {worker.name: worker.num_threads for worker in worker_setups(PLAN, num_cores=8)}
    assert threads == {"cpu/0": 1, "engine/0": 2, "train/0": 2, "train/1": 2}
    assert {worker.num_threads for worker in worker_setups(PLAN, num_cores=1)} == {1}


def test_a_pool_may_say_how_many_threads_its_workers_compute_with() -> None:
    plan = replace(PLAN, pools={name: replace(pool, threads_per_worker=3) for name, pool in PLAN.pools.items()})
    assert {worker.num_threads for worker in worker_setups(plan, num_cores=8)} == {3}


def test_workers_know_how_many_updates_a_cycle_has() -> None:
    nodes = {**NODES, "update": {**NODES["update"], "minibatch": 1}}
    made = document(nodes, models=MODELS, pools={"train": {}, "engine": {}},
                    schedule={"mode": "separate_async", "updates_per_sync": 2})  # fmt: skip
    assert {worker.updates_per_sync for worker in worker_setups(Pipeline(made).plan(), num_cores=2)} == {2}
    assert {worker.updates_per_sync for worker in worker_setups(PLAN, num_cores=2)} == {1}
    worker = Worker(worker_setups(Pipeline(made).plan(), num_cores=2)[0])
    assert worker.context(worker.setup.nodes[0]).updates_per_sync == 2


def test_only_workers_with_models_get_the_accelerator() -> None:
    devices = {worker.name: worker.device for worker in worker_setups(PLAN, num_cores=8, device="cuda")}
    assert devices == {"cpu/0": "cpu", "engine/0": "cuda", "train/0": "cuda", "train/1": "cuda"}


def test_a_set_up_is_a_value_that_travels() -> None:
    workers = worker_setups(PLAN, num_cores=8)
    assert pickle.loads(pickle.dumps(workers)) == workers
    judge = workers[0].nodes[0]
    assert (judge.on_error, judge.timeout, workers[0].seed) == ("unscored", 2.0, 5)
    rollout = next(worker for worker in workers if worker.pool == "engine").nodes[0]
    assert rollout.on_error == "drop"


def test_a_worker_makes_a_node_from_parameters_as_the_document_has_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from pathlib import Path\n"
        "from typing import NamedTuple\n"
        "from flowrl import Node, Sample\n"
        "class Mine(Node):\n"
        "    where: Path = Path('x')\n"
        "    class Out(NamedTuple):\n"
        "        score: Sample[float]\n"
        "    def run(self, value: Sample[float]) -> Out:\n"
        "        return self.Out(value)\n"
    )
    ref = find("./mine.py:Mine", tmp_path)
    made = NodeSetup("mine", ref, {"where": "a/b"}, None, {}, {}, (), "fail", None).made()
    assert made.where == Path("a/b")  # type: ignore[attr-defined]


def test_a_machine_is_asked_for_accelerators_and_a_cluster_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerators_here(local=False, address="auto") is None
    assert accelerators_here(local=True, address=None) is False
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert accelerators_here(local=False, address=None) is False


@pytest.mark.parametrize("local", [True, False])
def test_a_way_between_gpus_is_refused_where_there_are_none(local: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pipeline = load("grpo_sync", ["nodes.weight_sync.transport=ipc"])
    with pytest.raises(PipelineError, match=r"FR056.*needs GPUs"):
        rehearse(pipeline.plan(), pipeline.reading, local=local, address=None)
