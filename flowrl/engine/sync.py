"""Trained weights on their way to every engine of their model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from flowrl.engine.cluster import Cluster
from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan


class WeightSync:
    """Carries out the sync nodes of a plan; `workers` are the names of the workers of each pool."""

    def __init__(self, plan: Plan, cluster: Cluster, workers: Mapping[str, Sequence[str]]) -> None:
        self._plan, self._cluster, self._workers = plan, cluster, workers
        self._receivers: dict[str, Sequence[Any]] = {}

    def senders(self, node: BoundNode) -> Sequence[str]:
        """The workers that train the model of a sync."""
        return self._workers[self._plan.pool_of(node)]

    async def push_all(self, versions: Mapping[str, int]) -> None:
        """Give all engines, which start with the first weights, those of a run that goes on."""
        for node in self._plan.graph.nodes.values():
            if node.weights == "syncs" and node.model is not None and versions[node.model]:
                await self.push(node, versions[node.model])

    async def push(self, node: BoundNode, version: int) -> None:
        """Send the trained weights to every engine of the model, as this version."""
        engines = [worker for pool in self._plan.engine_pools(node.model) for worker in self._workers[pool]]
        if node.name not in self._receivers:
            asked = (self._cluster.receiver(worker, node.name) for worker in engines)
            self._receivers[node.name] = await asyncio.gather(*asked)
        await asyncio.gather(*(self._forward(sender, engines, node.name, version) for sender in self.senders(node)))

    async def _forward(self, sender: str, engines: Sequence[str], node: str, version: int) -> None:
        """Let every engine load each part that a sender sends, before the next one is taken."""
        async for part in self._cluster.send(sender, node, self._receivers[node]):
            await asyncio.gather(*(self._cluster.receive(worker, node, part, version) for worker in engines))
