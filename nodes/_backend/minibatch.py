"""Cutting a batch into mini-batches: which rows make one optimizer step depends on identities alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from flowrl.node import Context
from flowrl.nodes._backend.logprob import shared_prompts
from flowrl.partition import MicroBatch, plan_micro_batches
from flowrl.rows import Array, Jagged, Rows


@dataclass(frozen=True)
class TokenRows:
    """Trajectories as training reads them; all columns but the prompts have one value per response token."""

    prompts: Jagged
    responses: Jagged
    columns: Mapping[str, Jagged]
    positions: Array
    """Where each lies in the batch of the schedule."""

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            assert np.array_equal(column.lengths, self.responses.lengths), f"'{name}' has other rows than the responses"

    def __len__(self) -> int:
        return len(self.responses)

    def take(self, index: Array) -> TokenRows:
        """The trajectories at these positions."""
        columns = {name: column.take(index) for name, column in self.columns.items()}
        return TokenRows(self.prompts.take(index), self.responses.take(index), columns, self.positions[index])

    def with_any(self, mask: str) -> TokenRows:
        """The trajectories of which at least one token lies in the mask: others cost time and add nothing."""
        column = self.columns[mask]
        return self.take(np.flatnonzero(np.bincount(column.row, column.values, len(column)) > 0))

    @property
    def costs(self) -> Array:
        """Tokens of each trajectory (N,)."""
        return self.prompts.lengths + self.responses.lengths

    def plan(self, model: nn.Module, context: Context, max_tokens: int) -> list[MicroBatch]:
        """The micro-batches in which this rank computes its share of them with the model."""
        shared = shared_prompts(model, self.prompts)
        return plan_micro_batches(self.costs, context.num_ranks, context.rank, max_tokens, prompts=shared)

    @property
    def row(self) -> Tensor:
        """The trajectory (T,) of each response token."""
        return torch.from_numpy(self.responses.row)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The flat values (T,) of a column."""
        return torch.from_numpy(np.array(self.columns[name].values)).to(device)


def mini_batches(rows: Rows, num_prompts: int, shuffle_seed: str | None = None) -> Iterator[Array]:
    """Positions of the trajectories of each mini-batch of `num_prompts` groups, in canonical order.

    Groups come in the order of their uids, or, shuffled, of a hash of seed and uid: never in that of arrival.
    """

    def place(group: int) -> tuple[bytes, str]:
        uid = rows.uids[group]
        return b"" if shuffle_seed is None else hashlib.blake2b(f"{shuffle_seed}/{uid}".encode()).digest(), uid

    order = np.array(sorted(range(rows.num_groups), key=place), dtype=np.int64)
    canonical = rows.canonical_order()
    for start in range(0, len(order), num_prompts):
        yield canonical[np.isin(rows.group[canonical], order[start : start + num_prompts])]
