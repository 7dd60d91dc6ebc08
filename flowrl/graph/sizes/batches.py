"""Batch arithmetic: from P prompts x n samples down to the micro-batches of one rank, if all rows are equally long.

The rules are those of `nodes/_backend/partition.py` (rows over ranks, padded tokens of a micro-batch) and of the engine
(prompts over rollout workers, canonical blocks); tests compare the numbers with what really happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.sizes import lengths as names
from flowrl.graph.sizes.lengths import StepLengths, setting


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
    def rows_read(self) -> int:
        """Rows that go through the model in one pass over the step, all ranks together.

        More than there are where a rank repeats one, because it would be done before the others.
        """
        parts = [(self.num_parts - 1, self.prompts), (1, self.last_prompts)]
        return sum(times * (prompts * self.group + self._repeats(prompts)) for times, prompts in parts)

    @property
    def prompts_read(self) -> int:
        """Prompts that go through it with them; rows of a micro-batch that have the same prompt read it once."""
        return (self.num_parts - 1) * self._read_of_part(self.prompts) + self._read_of_part(self.last_prompts)

    def _repeats(self, prompts: int) -> int:
        """Rows of a part that are repeated: one by each rank that falls short and has no micro-batch to halve."""
        low, high = _spread(prompts * self.group, self.ranks)
        falls_short = self.max_tokens is not None and -(-low // self._most_rows) < -(-high // self._most_rows)
        return (
            self.ranks - prompts * self.group % self.ranks if falls_short and (not low or self._most_rows == 1) else 0
        )

    @property
    def _most_rows(self) -> int:
        """Rows of a micro-batch, if there are enough."""
        if self.max_tokens is None:
            return -(-self.rows // self.ranks)
        return max(1, self.max_tokens // self.row_tokens)

    def _read_of_part(self, prompts: int) -> int:
        """Rows are dealt out in turn, so consecutive rows of a rank lie as many rows apart as there are ranks."""
        rows, more = divmod(prompts * self.group, self.ranks)
        if self.ranks >= self.group:
            return prompts * self.group + self._repeats(prompts)  # no two rows of a rank have the same prompt
        found = self._repeats(prompts) + sum(
            self._read_of_rank(rank, rows + (rank < more)) for rank in range(self.ranks)
        )
        if more and rows and rows % self._most_rows == 0:  # the other ranks halve a micro-batch to keep in step
            found += sum(self._read_by_halving(rank) for rank in range(more, self.ranks))
        return found

    def _read_of_rank(self, rank: int, rows: int) -> int:
        size = self._most_rows
        full, rest = divmod(rows, size)
        # After so many micro-batches one starts again at the same row of a group.
        period = self.group // gcd(size * self.ranks, self.group)
        rounds, left = divmod(full, period)
        met = [self._distinct(rank + number * size * self.ranks, size) for number in range(min(full, period))]
        return rounds * sum(met) + sum(met[:left]) + self._distinct(rank + full * size * self.ranks, rest)

    def _read_by_halving(self, rank: int) -> int:
        """Prompts of the first micro-batch of a rank that both of its halves read."""
        half, size = self._most_rows // 2, self._most_rows
        second = self._distinct(rank + half * self.ranks, size - half)
        return (self._distinct(rank, half) + second - self._distinct(rank, size)) * (half > 0)

    def _distinct(self, first: int, rows: int) -> int:
        """Prompts of so many rows of a rank that start at this row of the part.

        With fewer ranks than rows of a group no prompt is passed over.
        """
        return (first + (rows - 1) * self.ranks) // self.group - first // self.group + 1 if rows else 0


def passes(plan: Plan, lengths: StepLengths) -> dict[str, Passes]:
    """What every node that reads or updates a model's weights does in a step, in plan order."""
    return {
        name: _passes(plan, plan.graph.nodes[name], lengths.of(name).total)
        for name in plan.graph.order
        if plan.graph.nodes[name].weights in ("reads", "updates")
    }


def optimizer_steps(plan: Plan) -> dict[str, int]:
    """Optimizer steps of each trained model in the whole run, if every mini-batch takes one.

    An update without the setting takes one for each batch.
    """
    found: dict[str, int] = {}
    for node in plan.graph.nodes.values():
        if node.weights == "updates" and node.model is not None:
            cut = _passes(plan, node, 0)
            found[node.model] = cut.num_optimizer_steps * (plan.document.run.steps // node.spec.every)
    return found


def _passes(plan: Plan, node: BoundNode, row_tokens: int) -> Passes:
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
        row_tokens=row_tokens,
    )


def generations(plan: Plan) -> dict[str, Generation]:
    """How every rollout spreads its prompts, in plan order."""
    group, nodes = plan.document.batch.group, plan.graph.nodes
    return {
        name: Generation(
            name, max(1, plan.pools[plan.pool_of(nodes[name])].workers // nodes[name].workers_per_copy),
            plan.document.prompts_in_flight, group,
            setting(nodes[name], names.MAX_SEQUENCES),
        )
        for name in plan.graph.order
        if nodes[name].weights == "generates"
    }  # fmt: skip


def _spread(num: int, over: int) -> tuple[int, int]:
    """Fewest and most of what one gets when so many are dealt out in turn."""
    return num // over, -(-num // over)
