"""The order in which a run takes rows, and the identity of each prompt.

Order and identity follow from (seed, epoch, row, attempt) alone, so that an interrupted run goes on exactly where it
was. The order is made from raw words of numpy's Philox generator, whose stream is fixed for ever; numpy promises no
such thing for `Generator.permutation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.data.base import Row


class Prompt(NamedTuple):
    """A row of data under the identity of its group."""

    uid: str
    row: Row


def prompt_uid(epoch: int, row: int, attempt: int = 0) -> str:
    """`u17`, in the second epoch `u17e1`, tried for the third time `u17e1a2`."""
    return f"u{row}" + f"e{epoch}" * (epoch > 0) + f"a{attempt}" * (attempt > 0)


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """A permutation of the rows; shape (num_rows,)."""
    words = np.random.Philox(np.random.SeedSequence([abs(seed), int(seed < 0), epoch])).random_raw(num_rows)
    return [int(row) for row in np.argsort(words, kind="stable")]


class PromptStream:
    """Rows without end, epoch after epoch."""

    def __init__(self, rows: Sequence[Row], seed: int, shuffle: bool = True) -> None:
        assert rows, "a data set has at least one row"
        self._rows, self._seed, self._shuffle = rows, seed, shuffle
        self._cursor = 0
        # Positions passed over because their row was in the batch already; they come first in the next batch.
        self._waiting: list[int] = []
        self._order: tuple[int, list[int]] = (-1, [])

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, no row twice among them even where an epoch ends inside the batch."""
        assert num_prompts <= len(self._rows), f"{num_prompts} different rows out of {len(self._rows)}"
        batch: dict[int, Prompt] = {}
        queue, self._waiting = self._waiting, []
        while len(batch) < num_prompts:
            if not queue:
                queue, self._cursor = [self._cursor], self._cursor + 1
            position = queue.pop(0)
            epoch, row = self._at(position)
            if row in batch:
                self._waiting.append(position)
            else:
                batch[row] = Prompt(prompt_uid(epoch, row), self._rows[row])
        self._waiting += queue
        return list(batch.values())

    def _at(self, position: int) -> tuple[int, int]:
        """Epoch and row at a position of the stream."""
        epoch, place = divmod(position, len(self._rows))
        if not self._shuffle:
            return epoch, place
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self._rows), self._seed, epoch))
        return epoch, self._order[1][place]

    def state(self) -> dict[str, Any]:
        """Where the stream is, for a checkpoint."""
        return {"cursor": self._cursor, "waiting": list(self._waiting)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._cursor, self._waiting = int(state["cursor"]), [int(position) for position in state["waiting"]]
