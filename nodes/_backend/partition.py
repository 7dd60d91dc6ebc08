"""How the rows of a mini-batch are split over ranks and micro-batches; every rank computes the same plan on its own.

A collective backend (FSDP, DDP) hangs when one rank runs more forward passes than another, so all ranks run the same
number of micro-batches. There are no synthetic rows: a rank with too few repeats a real one, excluded from the loss.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]


class MicroBatch(NamedTuple):
    """Rows of one forward pass, as positions in the mini-batch."""

    rows: Ints
    excluded: bool
    """A repeat that keeps this rank in step: its loss is left out by selection, but stays connected to the graph."""


def shards(costs: Ints, num_ranks: int) -> Ints:
    """The rank (N,) of each row, so that ranks cost about the same; each rank gets a row where there are enough.

    Greedy, dearest row first: at most 4/3 of the best possible. Costs are tokens, at least 0.
    """
    rank_of = np.zeros(len(costs), dtype=np.int64)
    load = [(0, 0, rank) for rank in range(num_ranks)]  # a heap; the number of rows decides between equal costs
    for position in np.argsort(-costs, kind="stable").tolist():
        cost, num_rows, rank = load[0]
        rank_of[position] = rank
        heapq.heapreplace(load, (cost + int(costs[position]), num_rows + 1, rank))
    return rank_of


def micro_batches(
    costs: Ints, max_tokens: int | None = None, max_rows: int | None = None, num_batches: int | None = None
) -> list[Ints]:
    """Positions of the rows of each micro-batch, rows of similar length together.

    A batch holds at most `max_rows` rows and `max_tokens` *padded* tokens (rows times the longest); a row longer than
    that stands alone. `num_batches` asks for more batches than needed: the dearest are halved while rows are left.
    """
    batches: list[Ints] = []
    order = np.argsort(-costs, kind="stable")
    start = 0
    while start < len(order):
        limits = [len(order) - start]
        if max_rows is not None:
            limits.append(max_rows)
        if max_tokens is not None:
            limits.append(max_tokens // max(int(costs[order[start]]), 1))
        stop = start + max(min(limits), 1)
        batches.append(order[start:stop])
        start = stop
    while num_batches is not None and len(batches) < min(num_batches, len(costs)):
        _halve_dearest(batches, costs)
    return batches


def plan_micro_batches(
    costs: Ints, num_ranks: int, rank: int, max_tokens: int | None = None, max_rows: int | None = None
) -> list[MicroBatch]:
    """The micro-batches of one rank: the same number on every rank, each row once over all ranks.

    `costs` (N,) are the tokens of all rows of the mini-batch. A rank left without rows repeats the cheapest of all.
    """
    if len(costs) == 0:
        return []
    rank_of = shards(costs, num_ranks)
    shares = [np.flatnonzero(rank_of == each) for each in range(num_ranks)]
    num_batches = max(len(micro_batches(costs[share], max_tokens, max_rows)) for share in shares)
    own = shares[rank]
    plan = [
        MicroBatch(own[batch], excluded=False) for batch in micro_batches(costs[own], max_tokens, max_rows, num_batches)
    ]
    candidates = own if len(own) else np.arange(len(costs))
    cheapest = candidates[[np.argmin(costs[candidates])]]
    return plan + [MicroBatch(cheapest, excluded=True)] * (num_batches - len(plan))


def _halve_dearest(batches: list[Ints], costs: Ints) -> None:
    """Split the dearest batch of two rows or more in place, its longer rows first."""
    dearest = max(
        (index for index, batch in enumerate(batches) if len(batch) > 1),
        key=lambda index: int(costs[batches[index]].sum()),
    )
    batch = batches[dearest]
    batches[dearest : dearest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
