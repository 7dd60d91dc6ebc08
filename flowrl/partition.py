"""How the rows of a mini-batch are split over ranks and micro-batches; every rank computes the same plan on its own.

A collective backend (FSDP, DDP) hangs when one rank runs more forward passes than another, so all ranks run the same
number of micro-batches. There are no synthetic rows: a rank with too few repeats a real one, excluded from the loss.

A micro-batch computes its rows padded to the longest, and each of its distinct prompts padded to the longest of those.
Rows are sorted, by length or by prompt, and the sorted rows are cut so that all of that together is least.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Ints = NDArray[np.integer[Any]]

SHARE_OF_A_PASS = 1 / 32
"""What a pass costs beside its tokens (adding up gradients, gathering weights, starting kernels), as a share of the
limit: who allows more tokens at a time has a machine that needs more of them to be busy. Where only padding counts,
32 rows of log-normal length (sigma 1) would take nine passes; a limit of 8,192 tokens makes five."""
FEWEST = 2**40
"""What a pass costs without such a limit: as few as possible are made."""
CELLS_AT_A_TIME = 2**18
NEVER = 2**61


class Prompts(NamedTuple):
    """The part of each row (N,) that rows of a micro-batch may share."""

    lengths: Ints
    """Tokens of the row's prompt."""
    same: Ints
    """Rows with equal numbers have the same prompt, and a micro-batch reads it once."""
    packed: bool = False
    """Rows lie one after the other instead, without padding, and each reads its own prompt."""

    def take(self, index: Ints) -> Prompts:
        """Of the rows at these positions."""
        return Prompts(self.lengths[index], self.same[index], self.packed)


class MicroBatch(NamedTuple):
    """Rows of one forward pass, as positions in the mini-batch."""

    rows: Ints
    num_tokens: int
    """That it computes, padding included; a prompt that its rows share counts once."""
    excluded: bool
    """A repeat that keeps this rank in step: its loss is left out by selection, but stays connected to the graph."""


def shards(costs: Ints, num_ranks: int, prompts: Prompts | None = None) -> Ints:
    """The rank (N,) of each row, so that ranks cost about the same; each rank gets a row where there are enough.

    `costs` (N,) are the tokens of each row, its prompt included. Rows that share a prompt stay together where the
    dearest rank then has less to do than if each row went for itself.
    """
    alone = _dealt(costs, num_ranks)
    if prompts is None or prompts.packed or not prompts.lengths.any() or len(np.unique(prompts.same)) < num_ranks:
        return alone
    _, first, group = np.unique(prompts.same, return_index=True, return_inverse=True)
    own, shared = costs - prompts.lengths, prompts.lengths[first]
    together = _dealt(shared + np.bincount(group, own).astype(np.int64), num_ranks)[group]

    def dearest(rank_of: Ints) -> float:
        read = np.unique(np.stack([rank_of, group]), axis=1)
        return float((np.bincount(rank_of, own, num_ranks) + np.bincount(read[0], shared[read[1]], num_ranks)).max())

    return together if dearest(together) < dearest(alone) else alone


def _dealt(costs: Ints, num_ranks: int) -> Ints:
    """Greedy, the dearest first to the rank that has least: at most 4/3 of the best possible."""
    rank_of = np.zeros(len(costs), dtype=np.int64)
    load = [(0, 0, rank) for rank in range(num_ranks)]  # a heap; the number of rows decides between equal costs
    for position in np.argsort(-costs, kind="stable").tolist():
        cost, num_rows, rank = load[0]
        rank_of[position] = rank
        heapq.heapreplace(load, (cost + int(costs[position]), num_rows + 1, rank))
    return rank_of


def micro_batches(
    costs: Ints,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    num_batches: int | None = None,
    prompts: Prompts | None = None,
) -> list[Ints]:
    """Positions of the rows of each micro-batch, longest rows first.

    `costs` (N,) are the tokens of each row, its prompt included. A batch holds at most `max_rows` rows and computes at
    most `max_tokens`; a row with more stands alone. `num_batches` asks for more batches than that makes: the dearest
    are halved while rows are left.
    """
    prompts = prompts or _no_prompts(costs)
    own = costs - prompts.lengths
    orders = [
        np.lexsort((prompts.same, -prompts.lengths, -own)),  # like lengths lie together
        np.lexsort((-own, prompts.same, -prompts.lengths)),  # rows of one prompt do
    ]
    if np.array_equal(*orders):
        orders.pop()
    cuts = [_cut(own[order], prompts.take(order), max_tokens, max_rows) for order in orders]
    order, (_, stops) = min(zip(orders, cuts, strict=True), key=lambda each: each[1][0])
    batches = np.split(order, stops[:-1]) if stops else []
    while num_batches is not None and len(batches) < min(num_batches, len(costs)):
        _halve_dearest(batches, costs)
    return batches


def plan_micro_batches(
    costs: Ints,
    num_ranks: int,
    rank: int,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    prompts: Prompts | None = None,
) -> list[MicroBatch]:
    """The micro-batches of one rank: the same number on every rank, each row once over all ranks.

    `costs` (N,) are the tokens of all rows of the mini-batch. A rank left without rows repeats the cheapest of all.
    """
    return plans_of_ranks(costs, num_ranks, max_tokens, max_rows, prompts)[rank]


def plans_of_ranks(
    costs: Ints,
    num_ranks: int,
    max_tokens: int | None = None,
    max_rows: int | None = None,
    prompts: Prompts | None = None,
) -> list[list[MicroBatch]]:
    """The micro-batches of every rank; see `plan_micro_batches`."""
    prompts = prompts or _no_prompts(costs)
    rank_of = shards(costs, num_ranks, prompts)
    shares = [np.flatnonzero(rank_of == each) for each in range(num_ranks)]

    def batches(own: Ints, num_batches: int | None = None) -> list[Ints]:
        part = prompts.take(own)
        return [own[batch] for batch in micro_batches(costs[own], max_tokens, max_rows, num_batches, part)]

    num_batches = max(len(batches(own)) for own in shares)
    plans = []
    for own in shares:
        plan = [MicroBatch(rows, tokens_of(rows, costs, prompts), excluded=False) for rows in batches(own, num_batches)]
        candidates = own if len(own) else np.arange(len(costs))
        if len(plan) < num_batches:
            cheapest = candidates[[np.argmin(costs[candidates])]]
            plan += [MicroBatch(cheapest, int(costs[cheapest[0]]), excluded=True)] * (num_batches - len(plan))
        plans.append(plan)
    return plans


def tokens_of(rows: Ints, costs: Ints, prompts: Prompts) -> int:
    """Tokens that a micro-batch of these rows computes, padding included."""
    if prompts.packed:
        return int(costs[rows].sum())
    num_prompts = len(np.unique(prompts.same[rows]))
    own = costs[rows] - prompts.lengths[rows]
    return num_prompts * int(prompts.lengths[rows].max()) + len(rows) * int(own.max())


def _no_prompts(costs: Ints) -> Prompts:
    return Prompts(np.zeros_like(costs), np.arange(len(costs)))


def _halve_dearest(batches: list[Ints], costs: Ints) -> None:
    """Split the dearest batch of two rows or more in place, its longer rows first."""
    dearest = max(
        (index for index, batch in enumerate(batches) if len(batch) > 1),
        key=lambda index: int(costs[batches[index]].sum()),
    )
    batch = batches[dearest]
    batches[dearest : dearest + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]


def _cut(own: Ints, prompts: Prompts, max_tokens: int | None, max_rows: int | None) -> tuple[int, list[int]]:
    """Where to cut rows that are sorted, and what all micro-batches then cost; of equal cuts the one that fills first.

    Dynamic programming from the last row to the first: the best cut from a row on is the best first micro-batch that
    starts there, and what is best after it.
    """
    num_rows = len(own)
    best = np.full(2 * num_rows + 1, NEVER)
    best[num_rows] = 0
    stop_of = np.zeros(num_rows, dtype=np.int64)
    starts = _starts(own, prompts, max_tokens, max_rows)
    while len(starts):
        # n rows from a start on compute at least n times its own tokens; packed, n times those of the shortest
        least = int((own if prompts.packed else own[starts]).min())
        most = num_rows if max_tokens is None or least == 0 else max(1, max_tokens // least)
        window = min(num_rows, most, num_rows if max_rows is None else max_rows)
        block = starts[-max(1, CELLS_AT_A_TIME // window) :]
        costs = _costs(own, prompts, block, window, max_tokens)
        for start, cost in zip(block[::-1].tolist(), costs[::-1], strict=True):
            total = cost + best[start + 1 : start + 1 + window]
            size = window - int(np.argmin(total[::-1]))
            best[start], stop_of[start] = total[size - 1], start + size
        starts = starts[: -len(block)]
    assert best[0] < NEVER, "a row alone is always allowed"
    stops = [0]
    while stops[-1] < num_rows:
        stops.append(int(stop_of[stops[-1]]))
    return int(best[0]), stops[1:]


def _starts(own: Ints, prompts: Prompts, max_tokens: int | None, max_rows: int | None) -> Ints:
    """Rows with which a micro-batch may begin: all, or the first of those that are equally long if no limit is near."""
    every = np.arange(len(own))
    most = len(own) * int(own.max(initial=0)) + len(np.unique(prompts.same)) * int(prompts.lengths.max(initial=0))
    if prompts.packed or (max_tokens is not None and most > max_tokens) or max_rows is not None:
        return every
    begins = (np.diff(own, prepend=-1) != 0) | (np.diff(prompts.lengths, prepend=-1) != 0)
    found: Ints = every[begins]
    return found


def _costs(own: Ints, prompts: Prompts, starts: Ints, window: int, max_tokens: int | None) -> Ints:
    """What micro-batches of 1 ... `window` rows cost that begin with these rows: (starts, window)."""

    def ahead(values: Ints, fill: int) -> Ints:
        padded = np.pad(values, (0, window), constant_values=fill)
        rows: Ints = sliding_window_view(padded, window)[starts]
        return rows

    by_prompt = np.argsort(prompts.same, kind="stable")
    before = np.full(len(own), -1)  # the last row before this one that has its prompt
    again = np.diff(prompts.same[by_prompt]) == 0
    before[by_prompt[1:][again]] = by_prompt[:-1][again]
    if prompts.packed:
        tokens = np.cumsum(ahead(own + prompts.lengths, 0), axis=1)
    else:
        num_prompts = np.cumsum(ahead(before, len(own)) < starts[:, None], axis=1)
        tokens = num_prompts * np.maximum.accumulate(ahead(prompts.lengths, 0), axis=1)
        tokens += np.maximum.accumulate(ahead(own, 0), axis=1) * np.arange(1, window + 1)
    costs: Ints = tokens + (FEWEST if max_tokens is None else max(1, int(max_tokens * SHARE_OF_A_PASS)))
    if max_tokens is not None:
        costs[:, 1:][tokens[:, 1:] > max_tokens] = NEVER  # one row must be possible
    return costs
