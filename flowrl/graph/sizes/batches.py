"""Batch arithmetic: from P prompts x n samples down to the micro-batches of one rank, if all rows are equally long.

The rules are those of `nodes/_backend/partition.py` (rows over ranks, padded tokens of a micro-batch) and of the engine
(prompts over rollout workers, canonical blocks); tests compare the numbers with what really happens.
"""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.sizes import lengths as names
from flowrl.graph.sizes.lengths import Lengths, setting


@dataclass(frozen=True)
class Generation:
    """How a rollout spreads the prompts in flight."""

    node: str
    workers: int
    num_prompts: int
    """In flight: P under sync, more under the asynchronous schedules."""
    group: int
    """Samples of each prompt."""
    max_sequences: int | None
    """Sessions generated at a time; None where the node has no such setting."""

    @property
    def prompts_per_worker(self) -> tuple[int, int]:
        """Fewest and most prompts of a worker."""
        return _spread(self.num_prompts, self.workers)

    @property
    def groups_at_once(self) -> int:
        """Most groups that a worker generates at a time: whole ones, at least one."""
        most = self.prompts_per_worker[1]
        return most if self.max_sequences is None else min(most, max(1, self.max_sequences // self.group))

    @property
    def sessions_at_once(self) -> int:
        """Most sessions that a worker generates at a time."""
        return self.groups_at_once * self.group

    @property
    def num_waves(self) -> int:
        """Rounds in which a worker with most prompts generates them."""
        return -(-self.prompts_per_worker[1] // self.groups_at_once)


@dataclass(frozen=True)
class Passes:
    """How a node that reads or updates weights cuts a step: parts, rows of a part over ranks, micro-batches of a rank.

    A part is a mini-batch of an update, or one call of a reader.
    """

    node: str
    updates: bool
    num_parts: int
    """In one pass over the step's prompts."""
    prompts: int
    """Of a part."""
    last_prompts: int
    """Of the last part."""
    group: int
    epochs: int
    ranks: int
    max_tokens: int | None
    """Padded tokens of a micro-batch; None where the node has no such setting."""
    row_tokens: int

    @property
    def rows(self) -> int:
        """Trajectories of a part."""
        return self.prompts * self.group

    @property
    def rows_per_rank(self) -> tuple[int, int]:
        """Fewest and most rows of a part that a rank works on."""
        return _spread(self.rows, self.ranks)

    @property
    def rows_per_micro_batch(self) -> int | None:
        """Most rows of one forward pass; a row longer than the limit stands alone."""
        if self.max_tokens is None:
            return None
        return min(max(1, self.max_tokens // self.row_tokens), self.rows_per_rank[1])

    @property
    def num_micro_batches(self) -> int | None:
        """Of each rank and part: all ranks run the same number, as the one with most rows needs."""
        size = self.rows_per_micro_batch
        return None if size is None else -(-self.rows_per_rank[1] // size)

    @property
    def num_optimizer_steps(self) -> int:
        """Of a step; 0 for a reader."""
        return self.num_parts * self.epochs * self.updates

    @property
    def prompts_read(self) -> float:
        """Prompts that go through the model in one pass over the step, all ranks together.

        Rows of a micro-batch that have the same prompt read it once. Rows are dealt out to the ranks in turn, so of k
        consecutive rows of a rank the first and the last lie (k - 1) x ranks rows apart.
        """
        return (self.num_parts - 1) * self._read_of_part(self.prompts) + self._read_of_part(self.last_prompts)

    def _read_of_part(self, prompts: int) -> float:
        rows, more = divmod(prompts * self.group, self.ranks)
        return more * self._read_of_rank(rows + 1, prompts) + (self.ranks - more) * self._read_of_rank(rows, prompts)

    def _read_of_rank(self, rows: int, prompts: int) -> float:
        size = self.rows_per_micro_batch or max(rows, 1)
        full, rest = divmod(rows, size)
        return full * self._distinct(size, prompts) + self._distinct(rest, prompts)

    def _distinct(self, rows: int, prompts: int) -> float:
        """Prompts of so many consecutive rows of a rank, on average."""
        if rows == 0:
            return 0.0
        aligned = rows * self.ranks % self.group == 0
        met = rows * self.ranks / self.group if aligned else 1 + (rows - 1) * self.ranks / self.group
        return min(met, rows, prompts)


def passes(plan: Plan, lengths: Lengths) -> dict[str, Passes]:
    """What every node that reads or updates a model's weights does in a step, in plan order."""
    return {
        name: _passes(plan, plan.graph.nodes[name], lengths)
        for name in plan.graph.order
        if plan.graph.nodes[name].weights in ("reads", "updates")
    }


def _passes(plan: Plan, node: BoundNode, lengths: Lengths) -> Passes:
    batch, updates = plan.document.batch, node.weights == "updates"
    whole = max(1, batch.prompts // plan.updates_per_sync) if updates else batch.prompts
    part = setting(node, names.MINIBATCH) if updates else plan.canonical_groups.get(node.name)
    part = min(part or whole, whole)
    per_batch = -(-whole // part)
    return Passes(
        node=node.name,
        updates=updates,
        num_parts=per_batch * (plan.updates_per_sync if updates else 1),
        prompts=part,
        last_prompts=whole - (per_batch - 1) * part,
        group=batch.group,
        epochs=(setting(node, names.EPOCHS) or 1) if updates else 1,
        ranks=plan.pools[plan.pool_of(node)].workers,
        max_tokens=setting(node, names.MAX_TOKENS_PER_MICROBATCH),
        row_tokens=lengths.total,
    )


def generations(plan: Plan) -> dict[str, Generation]:
    """How every rollout spreads its prompts, in plan order."""
    group, nodes = plan.document.batch.group, plan.graph.nodes
    return {
        name: Generation(
            name, plan.pools[plan.pool_of(nodes[name])].workers, plan.document.prompts_in_flight, group,
            setting(nodes[name], names.MAX_SEQUENCES),
        )
        for name in plan.graph.order
        if nodes[name].weights == "generates"
    }  # fmt: skip


def between(numbers: tuple[int, int]) -> str:
    """`85 or 86`, or the one number that both are."""
    low, high = numbers
    return f"{low:,}" if low == high else f"{low:,} or {high:,}"


def _spread(num: int, over: int) -> tuple[int, int]:
    """Fewest and most of what one gets when so many are dealt out in turn."""
    return num // over, -(-num // over)
