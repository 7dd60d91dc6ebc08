"""Workers on Ray that serve: calls beside each other and beside training, pauses, updates, ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowrl.batch import Batch, Prompt
from flowrl.engine.call import Call, NodeSetup, Receipt, WorkerSetup
from flowrl.engine.cluster import Cluster
from flowrl.engine.local import LocalCluster
from flowrl.engine.pools import RayCluster
from flowrl.fields import FieldType
from flowrl.graph.pools import Pool
from flowrl.model import ModelSpec
from flowrl.nodes._backend.weights import Bucket, Update
from flowrl.registry import find
from flowrl.rows import Rows

UIDS = tuple(f"u{index}" for index in range(6))
WORKER = "gpu/0"


def library(name: str, use: str, **settings: Any) -> NodeSetup:
    ref = find(use, Path())
    made = ref.load()
    writes = {port: port for port in made.output_ports}
    reads = {port: (port,) for port, each in made.input_ports.items() if not each.optional}
    return NodeSetup(name, ref, settings, "policy", reads, writes, (tuple(writes),) * bool(writes), "fail", None)


@pytest.fixture(params=["ray", "local"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One worker with a scripted engine: responses of 8 tokens that take a second, in blocks of a group."""
    script = {"texts": ["1234567"], "tokens_per_second": 8.0, "seconds": [0.0, 0.1, 0.2]}
    nodes = (
        library("rollout", "rollout.generate", engine="fake", max_tokens=8, script=script),
        library("stuck", "rollout.generate", engine="fake", max_tokens=8, script={"stall": 1.0}),
        library("sync", "sync.weights", bucket_mib=1),
    )
    models = {"policy": ModelSpec(path="arith-tiny", trainable=True)}
    setup = WorkerSetup("gpu", 0, 1, nodes, models, seed=0, num_threads=1, can_kill=False)
    made: RayCluster | LocalCluster = LocalCluster()
    if request.param == "ray":
        made = RayCluster({"gpu": Pool("gpu", 1, 1.0, True, ("gpu",), {})}, [], 2, None, lambda stage: None)
        made.connect()
    made.start([setup])
    yield made
    made.close()


def prompts() -> Batch:
    rows = Rows(UIDS, planned=[2] * 6, settled=[0] * 6)
    return Batch(rows, {"prompt": Prompt(rows, ["1+1="] * 6)}, {"prompt": FieldType("Prompt", "str")})


async def served(cluster: Cluster, uids: tuple[str, ...], node: str = "rollout") -> list[Receipt]:
    call = Call(node, 1, uids, block_groups=1, serves=True)
    blocks: AsyncIterator[tuple[Receipt, list[Any]]] = cluster.call(WORKER, call, [cluster.put(prompts())], 1)
    return [receipt async for receipt, _ in blocks]


async def update(cluster: Cluster, version: int) -> None:
    for part in (Bucket({}, {}, begins=Update({})), Bucket({}, {}, ends=True)):
        await cluster.receive(WORKER, "sync", part, version)


async def over_a_sync_in_parts(cluster: Cluster) -> None:
    """Each part lets other work of the driver run, which must not wait for the last one."""
    call = asyncio.create_task(served(cluster, UIDS))
    await asyncio.sleep(0.1)
    receivers = [await cluster.receiver(WORKER, "sync")]
    async for part in cluster.send(WORKER, "sync", receivers):
        await asyncio.gather(cluster.receive(WORKER, "sync", part, 2), asyncio.sleep(0.01))
    assert sorted(uid for receipt in await asyncio.wait_for(call, 30) for uid in receipt.settled) == list(UIDS)


async def over_a_pause_and_an_update(cluster: Cluster) -> None:
    calls = [asyncio.create_task(served(cluster, uids)) for uids in (UIDS[:3], UIDS[3:])]
    await asyncio.sleep(0.2)
    await cluster.pause(WORKER)
    await asyncio.sleep(1.2)
    assert not any(call.done() for call in calls)
    await update(cluster, 1)
    await cluster.resume(WORKER)
    first, second = [await asyncio.wait_for(call, 30) for call in calls]
    (later,) = await served(cluster, UIDS[:1])
    assert sorted(uid for receipt in first for uid in receipt.settled) == list(UIDS[:3])
    assert sorted(uid for receipt in second for uid in receipt.settled) == list(UIDS[3:])
    assert not any(receipt.failed or receipt.failures for receipt in [*first, *second, later])
    assert set().union(*(receipt.oldest.values() for receipt in [*first, *second])) <= {0, 1}
    assert later.oldest == {"u0": 1}


async def beside_groups_that_never_end(cluster: Cluster) -> None:
    stuck = asyncio.create_task(served(cluster, UIDS[:2], "stuck"))
    assert len(await served(cluster, UIDS[2:4])) == 2
    assert not stuck.done()
    await cluster.abort(WORKER, "stuck", UIDS[:2])
    receipts = await asyncio.wait_for(stuck, 30)
    assert sorted(uid for receipt in receipts for uid in receipt.settled) == list(UIDS[:2])
    assert not any(len(receipt.rows) or receipt.failures for receipt in receipts)


def test_a_worker_serves_calls_beside_each_other_over_pauses_updates_and_aborts(cluster: Cluster) -> None:
    asyncio.run(over_a_pause_and_an_update(cluster))
    asyncio.run(over_a_sync_in_parts(cluster))
    if not isinstance(cluster, LocalCluster):  # whose one thread would wait for the end
        asyncio.run(beside_groups_that_never_end(cluster))
