"""What the fake engine answers, and how long it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from pydantic import Field, model_validator

from flowrl.model import SettingError, Settings
from flowrl.node import Node


@dataclass(frozen=True)
class Session:
    """What becomes of one session."""

    text: str | None
    """What it answers; None where it fails."""
    seconds: float
    """How long it takes; infinity where it never ends."""


class Script(Settings):
    """The same for a session wherever and whenever it runs: what is drawn is drawn by its seed."""

    texts: list[str | None] = Field(["0", "1"], min_length=1)
    """Session s of every prompt answers with text s, over again when they run out; null is a session that fails."""
    shuffle: bool = False
    """Draw the text of each session instead."""
    seconds: list[float] = Field([0.0], min_length=1)
    """What each session of prompt p of a call takes, over again when they run out."""
    tokens_per_second: float | None = Field(None, gt=0)
    """Speed of each session: its tokens add so much to its time; null is at once."""
    slow: float = Field(0.0, ge=0, le=1)
    """Share of sessions that take `slow_factor` times as long."""
    slow_factor: float = Field(10.0, gt=0)
    """How many times as long those take."""
    spread: float = Field(0.0, ge=0)
    """Standard deviation of the logarithm of a further factor on the time of each session."""
    fail: float = Field(0.0, ge=0, le=1)
    """Share of sessions that fail when an engine is asked for them the first time."""
    stall: float = Field(0.0, ge=0, le=1)
    """Share of prompts that never end when an engine is asked for them the first time."""
    vocabulary: int | None = Field(None, ge=2)
    """Token ids lie below this; null is 257, or as many words as a smaller model on this machine knows."""

    @model_validator(mode="after")
    def _some_are_slow(self) -> Self:
        if not self.slow and self.slow_factor != type(self).model_fields["slow_factor"].default:
            raise SettingError(("slow_factor", "slow"), "slow_factor has no effect with slow: 0", "slow: 0.1")
        return self

    def sessions(self, position: int, seeds: Sequence[int], max_tokens: int, is_first: bool) -> list[Session]:
        """The sessions of the prompt at this place of a call; `is_first` if it was not asked for before."""
        stalls = is_first and self.stall > 0 and np.random.default_rng([seeds[0], 1]).random() < self.stall
        sessions = (self._session(position, place, seed, max_tokens, is_first) for place, seed in enumerate(seeds))
        return [replace(session, seconds=math.inf) if stalls else session for session in sessions]

    def _session(self, position: int, place: int, seed: int, max_tokens: int, is_first: bool) -> Session:
        text, factor, fails = self.texts[place % len(self.texts)], 1.0, False
        if self.shuffle or self.slow or self.spread or self.fail:
            draw = np.random.default_rng(seed)
            slow, failing = draw.random(2)
            drawn, spread = self.texts[int(draw.integers(len(self.texts)))], float(draw.normal())
            text = drawn if self.shuffle else text
            factor = math.exp(self.spread * spread) * (self.slow_factor if slow < self.slow else 1.0)
            fails = is_first and bool(failing < self.fail)
        num_tokens = min(len((text or "").encode()) + 1, max_tokens)
        seconds = self.seconds[position % len(self.seconds)] + num_tokens / (self.tokens_per_second or math.inf)
        return Session(None if fails else text, factor * seconds)


def refuse_unread(node: Node, engine: str) -> None:
    """Raise `SettingError` for a script that a node has and its engine does not read."""
    if engine != "fake" and getattr(node, "script", None) != type(node).model_fields["script"].default:
        raise SettingError(("script", "engine"), f"engine '{engine}' has no script", "engine: fake")
