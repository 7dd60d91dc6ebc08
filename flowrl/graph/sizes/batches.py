"""Batch arithmetic: from P prompts x n samples down to the micro-batches of one rank, if all rows are equally long.

Rows are split by the very function that nodes call (`flowrl.partition`); the other rules are those of the engine
(prompts over rollout workers, canonical blocks). Tests compare the numbers with what really happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.sizes import lengths as names
from flowrl.graph.sizes.lengths import Lengths, StepLengths, setting
from flowrl.partition import Prompts, plans_of_ranks
from flowrl.spec.document import Document


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
    lengths: Lengths

    @property
    def rows(self) -> int:
        """Trajectories of a part."""
        return self.prompts * self.group

    @property
    def rows_per_rank(self) -> tuple[int, int]:
        """Fewest and most rows of a part that a rank works on."""
        return self._split(self.prompts).rows_per_rank

    @property
    def rows_per_micro_batch(self) -> int | None:
        """Most rows of one forward pass; a row longer than the limit stands alone."""
        return None if self.max_tokens is None else self._split(self.prompts).most_rows

    @property
    def num_micro_batches(self) -> int | None:
        """Of each rank and part: all ranks run the same number, as the one with most rows needs."""
        return None if self.max_tokens is None else self._split(self.prompts).num_micro_batches

    @property
    def num_optimizer_steps(self) -> int:
        """Of a step; 0 for a reader."""
        return self.num_parts * self.epochs * self.updates

    @property
    def rows_read(self) -> int:
        """Rows that go through the model in one pass over the step, all ranks together.

        More than there are where a rank repeats one, because it would be done before the others.
        """
        return (self.num_parts - 1) * self._split(self.prompts).rows_read + self._split(self.last_prompts).rows_read

    @property
    def prompts_read(self) -> int:
        """Prompts that go through it with them; rows of a micro-batch that have the same prompt read it once."""
        whole, last = self._split(self.prompts), self._split(self.last_prompts)
        return (self.num_parts - 1) * whole.prompts_read + last.prompts_read

    def _split(self, prompts: int) -> Split:
        lengths = self.lengths.prompt_tokens, self.lengths.response_tokens
        factor = max(prompts * self.group / MOST_ROWS, self.ranks / MOST_RANKS)
        if factor <= 1:
            return split(prompts, self.group, self.ranks, self.max_tokens, *lengths)
        ranks = max(1, int(self.ranks / factor))
        fewer = max(1, min(round(prompts * ranks / self.ranks), MOST_ROWS // self.group))
        return split(fewer, self.group, ranks, self.max_tokens, *lengths).times(prompts, fewer, self.ranks, ranks)


MOST_ROWS, MOST_RANKS = 2048, 16
"""Larger parts are worked out from one that is as much smaller, which takes milliseconds in place of minutes."""


@dataclass(frozen=True)
class Split:
    """What becomes of a part whose rows are all equally long."""

    rows_per_rank: tuple[int, int]
    """Fewest and most, each row counted once."""
    num_micro_batches: int
    """Of each rank."""
    most_rows: int
    """Of a micro-batch."""
    rows_read: int
    prompts_read: int

    def times(self, prompts: int, of_prompts: int, ranks: int, of_ranks: int) -> Split:
        """As it would be with so many prompts and ranks."""
        size = prompts / of_prompts
        low, high = (round(rows * size * of_ranks / ranks) for rows in self.rows_per_rank)
        batches = round(self.num_micro_batches * size * of_ranks / ranks)
        return Split(
            (low, high),
            max(1, batches),
            self.most_rows,
            *(round(n * size) for n in (self.rows_read, self.prompts_read)),
        )


@lru_cache(maxsize=1024)
def split(
    prompts: int, group: int, ranks: int, max_tokens: int | None, prompt_tokens: int, response_tokens: int
) -> Split:
    """Cut `prompts` groups of equally long rows over ranks and micro-batches, as a node does."""
    same = np.repeat(np.arange(prompts), group)
    shared = Prompts(np.full(len(same), prompt_tokens), same)
    plans = plans_of_ranks(shared.lengths + response_tokens, ranks, max_tokens, prompts=shared)
    batches = [batch.rows for plan in plans for batch in plan]
    own = [sum(len(batch.rows) for batch in plan if not batch.excluded) for plan in plans]
    return Split(
        (min(own), max(own)),
        len(plans[0]),
        max((len(rows) for rows in batches), default=0),
        sum(len(rows) for rows in batches),
        sum(len(np.unique(same[rows])) for rows in batches),
    )


def passes(plan: Plan, lengths: StepLengths) -> dict[str, Passes]:
    """What every node that reads or updates a model's weights does in a step, in plan order."""
    return {
        name: _passes(plan, plan.graph.nodes[name], lengths.of(name))
        for name in plan.graph.order
        if plan.graph.nodes[name].weights in ("reads", "updates")
    }


def optimizer_steps(plan: Plan) -> dict[str, int]:
    """Optimizer steps of each trained model in the whole run, as `steps_of_run` counts them."""
    updates = (node for node in plan.graph.nodes.values() if node.weights == "updates")
    return {node.model: steps_of_run(node, plan.document) for node in updates if node.model is not None}


def steps_of_run(node: BoundNode, document: Document) -> int:
    """Optimizer steps of an update in the whole run, if every mini-batch takes one once the update begins.

    An update without the setting takes one for each batch.
    """
    whole = max(1, document.batch.prompts // document.updates_per_sync)
    _, per_batch = _cut(whole, setting(node, names.MINIBATCH))
    of_step = per_batch * document.updates_per_sync * (setting(node, names.EPOCHS) or 1)
    steps, waited, every = document.run.steps, setting(node, names.AFTER_STEP) or 0, node.spec.every
    return of_step * (steps // every - min(waited, steps) // every)


def _cut(whole: int, part: int | None) -> tuple[int, int]:
    """Prompts of a part of a batch, and how many parts there are: one where nobody says how large."""
    part = min(part or whole, whole)
    return part, -(-whole // part)


def _passes(plan: Plan, node: BoundNode, lengths: Lengths) -> Passes:
    batch, updates = plan.document.batch, node.weights == "updates"
    whole = max(1, plan.groups_per_batch) if updates else batch.prompts
    part = setting(node, names.MINIBATCH) if updates else plan.canonical_groups.get(node.name)
    part, per_batch = _cut(whole, part)
    return Passes(
        node=node.name,
        updates=updates,
        num_parts=per_batch * (plan.updates_per_sync if updates else 1),
        prompts=part,
        last_prompts=whole - (per_batch - 1) * part,
        group=plan.sessions[node.name],
        epochs=(setting(node, names.EPOCHS) or 1) if updates else 1,
        ranks=plan.pools[plan.pool_of(node)].workers,
        max_tokens=setting(node, names.MAX_TOKENS_PER_MICROBATCH),
        lengths=lengths,
    )


def generations(plan: Plan) -> dict[str, Generation]:
    """How every rollout spreads its prompts, in plan order."""
    nodes = plan.graph.nodes
    return {
        name: Generation(
            name, max(1, plan.pools[plan.pool_of(nodes[name])].workers // nodes[name].workers_per_copy),
            plan.document.prompts_in_flight, nodes[name].sessions,
            setting(nodes[name], names.MAX_SEQUENCES),
        )
        for name in plan.graph.order
        if nodes[name].weights == "generates"
    }  # fmt: skip


def _spread(num: int, over: int) -> tuple[int, int]:
    """Fewest and most of what one gets when so many are dealt out in turn."""
    return num // over, -(-num // over)
