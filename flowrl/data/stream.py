"""The order in which a run takes rows, and the identity of each prompt.

Order and identity follow from (seed, epoch, row, attempt) alone, so that an interrupted run goes on exactly where it
was. The order is made from raw words of numpy's Philox generator, whose stream is fixed for ever; numpy promises no
such thing for `Generator.permutation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.data.rows import Loaded, Mixed, Part, Row, Streamed
from flowrl.errors import PipelineError, RunError


class Prompt(NamedTuple):
    """A row of data, and which attempt of it a group is."""

    name: str
    """Its place in the data, see `prompt_name`."""
    row: Row
    attempt: int = 0

    @property
    def uid(self) -> str:
        """The identity of its group: `u17e1`, tried for the third time `u17e1a2`."""
        return self.name + f"a{self.attempt}" * (self.attempt > 0)


def prompt_name(epoch: int, row: int, source: int = 0) -> str:
    """`u17`, in the second epoch `u17e1`; of a mixture's second source `u17s1`."""
    return f"u{row}" + f"s{source}" * (source > 0) + f"e{epoch}" * (epoch > 0)


def epoch_order(num_rows: int, seed: int, epoch: int, *more: int) -> list[int]:
    """A permutation of the rows; shape (num_rows,). `more` tells sources and stretches of a stream apart."""
    entropy = [abs(seed), int(seed < 0), epoch, *more]
    words = np.random.Philox(np.random.SeedSequence(entropy)).random_raw(num_rows)
    return [int(row) for row in np.argsort(words, kind="stable")]


class PromptStream:
    """Rows without end, epoch after epoch."""

    def __init__(self, rows: Loaded, seed: int, shuffle: bool = True) -> None:
        parts = rows.parts if isinstance(rows, Mixed) else (Part(rows, shuffle=shuffle),)
        self._parts = [_Turns(part, seed, number) for number, part in enumerate(parts)]
        self._pattern = Pattern([part.weight for part in parts])
        self._cursor = 0
        # Positions passed over because their row was in the batch already; they come first in the next batch.
        self._waiting: list[int] = []

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts, no row twice among them even where an epoch ends inside the batch.

        Raises `RunError` where a row that is read in the run is wrong.
        """
        try:
            if short := self.shortage(num_prompts):
                raise RunError(short)
            return self._take(num_prompts)
        except PipelineError as error:
            raise RunError(str(error)) from error

    def _take(self, num_prompts: int) -> list[Prompt]:
        batch: dict[tuple[int, int], Prompt] = {}
        queue, self._waiting = self._waiting, []
        while len(batch) < num_prompts:
            if not queue:
                queue, self._cursor = [self._cursor], self._cursor + 1
            position = queue.pop(0)
            source, turn = self._pattern.at(position)
            epoch, row = self._parts[source].at(turn)
            if (source, row) in batch:
                self._waiting.append(position)
            else:
                batch[source, row] = Prompt(prompt_name(epoch, row, source), self._parts[source].row(row))
        self._waiting += queue
        return list(batch.values())

    def shortage(self, num_prompts: int) -> str:
        """Why so many prompts cannot be had at once; empty when they can. Reads on where rows are streamed."""
        for part, share in zip(self._parts, self._pattern.shares, strict=True):
            least = max(1, math.ceil(share * num_prompts - 1e-9))
            if not part.reaches(least):
                whose = f" of '{part.name}'" if part.name else ""
                return f"{least} prompts{whose} are needed at once, but there are {part.num_rows}"
        return ""

    def state(self) -> dict[str, Any]:
        """Where the stream is, for a checkpoint."""
        return {"cursor": self._cursor, "waiting": list(self._waiting)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._cursor, self._waiting = int(state["cursor"]), [int(position) for position in state["waiting"]]


class _Turns:
    """Which row of one source comes at its k-th turn.

    Rows are shuffled in stretches: the whole epoch where all rows are there, the window of a stream.
    """

    def __init__(self, part: Part, seed: int, number: int) -> None:
        self.name, self._rows, self._defaults = part.name, part.rows, part.defaults
        self._seed, self._shuffle, self._number = seed, part.shuffle, number
        self._order: tuple[tuple[int, int], list[int]] = ((-1, -1), [])

    @property
    def num_rows(self) -> int:
        """Rows that there are, of a stream those that have been read."""
        return self._rows.num_read if isinstance(self._rows, Streamed) else len(self._rows)

    def reaches(self, num_rows: int) -> bool:
        """Whether there are so many rows."""
        return self._rows.reaches(num_rows) if isinstance(self._rows, Streamed) else len(self._rows) >= num_rows

    def row(self, position: int) -> Row:
        """The row at a position of the data."""
        row = self._rows[position]
        return {**self._defaults, **row} if self._defaults else row

    def at(self, turn: int) -> tuple[int, int]:
        """Epoch and row at a turn."""
        window = self._rows.window if isinstance(self._rows, Streamed) else len(self._rows)
        # Only when the stretch of a stream has been read is it known whether the epoch ends in it.
        ended = not (isinstance(self._rows, Streamed) and self._rows.reaches(turn - turn % window + window))
        epoch, place = divmod(turn, self.num_rows) if ended else (0, turn)
        if not self._shuffle:
            return epoch, place
        start = place - place % window
        if self._order[0] != (epoch, start):
            size = min(window, self.num_rows - start) if ended else window
            more = [self._number, start] if start else [self._number] if self._number else []
            self._order = ((epoch, start), epoch_order(size, self._seed, epoch, *more))
        return epoch, start + self._order[1][place - start]


class Pattern:
    """Whose turn it is: each source gets its share of every stretch, to within one prompt.

    R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of the sources that may have a turn
    without running ahead, the one whose turn is due first.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = [weight / sum(weights) for weight in weights]
        self._slack = 1 - 1 / max(2 * len(weights) - 2, 1)
        self._turns = [0] * len(weights)
        self._past: list[tuple[int, int]] = []

    def at(self, position: int) -> tuple[int, int]:
        """The source at a position, and how many turns it had before."""
        if len(self.shares) == 1:
            return 0, position
        while len(self._past) <= position:
            source = self._next(len(self._past) + 1)
            self._past.append((source, self._turns[source]))
            self._turns[source] += 1
        return self._past[position]

    def _next(self, number: int) -> int:
        every = range(len(self.shares))
        ready = [one for one in every if self.shares[one] * number >= self._turns[one] + 1 - self._slack - 1e-9]
        return min(ready or every, key=lambda one: (self._turns[one] + self._slack) / self.shares[one])
