"""The limit on prompts: those with more tokens are left out, or refused, and either is reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from flowrl.data.base import BAD_DATA, Loading
from flowrl.data.rows import Row, Streamed
from flowrl.encode import dumps
from flowrl.errors import PipelineError, Problem

NUM_REPORTED = 10
CHUNK = 64
"""Rows of a stream that are measured together."""
PATIENCE = 10_000
"""So many rows of a stream in a row may be too long; after that, the limit is taken for a mistake."""


@dataclass
class Limit:
    """Measures rows, keeps the short ones and remembers what it saw."""

    most: int
    overlong: Literal["drop", "error"]
    loading: Loading
    can_tell: bool = True
    num_seen: int = 0
    longest: int = 0
    num_long: int = 0
    first_long: list[tuple[int, int, str]] = field(default_factory=list)
    """Number, tokens and beginning of the first rows that are too long."""

    def applied(self, rows: Sequence[Row] | Streamed) -> Sequence[Row] | Streamed:
        """The rows that are short enough; those of a stream are measured when they are read."""
        if isinstance(rows, Streamed):
            what = "left out" if self.overlong == "drop" else "an error"
            said = f"a prompt of more than {self.most} tokens is {what} when it is read"
            self.loading.note(f"{self.loading.name}: {said}")
            return Streamed(self._kept(rows), rows.window)
        kept = self._short(rows)
        self._refuse()
        self._report()
        return kept

    def _short(self, rows: Sequence[Row]) -> list[Row]:
        lengths = self.loading.lengths(rows) if rows and self.can_tell else None
        if lengths is None:
            self._give_up(rows)
            return list(rows)
        kept = []
        for row, length in zip(rows, lengths, strict=True):
            self.num_seen, self.longest = self.num_seen + 1, max(self.longest, length)
            if length <= self.most:
                kept.append(row)
                continue
            self.num_long += 1
            if len(self.first_long) < NUM_REPORTED:
                self.first_long.append((self.num_seen, length, dumps(row.get("prompt"))[:60]))
        return kept

    def _kept(self, rows: Streamed) -> Iterator[Row]:
        source = rows.in_order()
        since = 0
        while chunk := list(islice(source, CHUNK)):
            kept = self._short(chunk)
            self._refuse()
            since = 0 if kept else since + len(chunk)
            if since > PATIENCE:
                raise PipelineError([self._problem(f"the last {since} prompts have more than {self.most} tokens")])
            yield from kept
        self._report()

    def _give_up(self, rows: Sequence[Row]) -> None:
        if rows and self.can_tell:
            self.can_tell = False
            self.loading.note(f"{self.loading.name}: max_prompt_tokens has no effect: no rollout counts the tokens")

    def _report(self) -> None:
        if self.can_tell:
            self.loading.note(self._summary())

    def _summary(self) -> str:
        if not self.num_long:
            have = f"all {self.num_seen} prompts have at most {self.most} tokens"
            return f"{self.loading.name}: {have}; the longest has {self.longest}"
        dropped = f"{self.num_long} of {self.num_seen} prompts have more than {self.most} tokens and are left out"
        return f"{self.loading.name}: {dropped}; the longest has {self.longest}"

    def _refuse(self) -> None:
        if self.overlong == "error" and self.num_long:
            fact = f"{self.num_long} of {self.num_seen} prompts have more than {self.most} tokens"
            raise PipelineError([self._problem(fact)])

    def _problem(self, fact: str) -> Problem:
        notes = [f"row {number} has {length}: {text}" for number, length, text in self.first_long]
        more = self.num_long - len(notes)
        fix = f"max_prompt_tokens: {self.longest}, or overlong: drop"
        place = self.loading.place("max_prompt_tokens")
        return Problem(BAD_DATA, place, fact, fix, (*notes, *[f"and {more} more"] * (more > 0)))
