"""The prompts in flight: from admission until their groups are trained, or given up for a reason that has a name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Reason = Literal["stale", "late", "filtered", "failed", "surplus"]
"""Why a group is not trained: too old, without an end within its timeout, refused by the gate, without trajectories, or
more than was needed."""
AGAIN = ("stale", "late")
"""Reasons that say nothing of the prompt: it is tried again."""
PATIENCE = 2
"""Attempts of a prompt, given up for such a reason, after which it is never again given up for its age."""


@dataclass
class Group:
    """A prompt and its trajectories."""

    uid: str
    number: int
    """Its place in the order of admission."""
    version: int
    """Of the weights when it was admitted: none of its tokens is older."""
    waits: bool = False
    """Never given up for its age: batches wait for it instead."""
    settled: bool = False
    """Whatever a batch needs of it is there."""
    num_sessions: int = 0
    """Trajectories that it has."""
    oldest: int | None = None
    """Smallest version of its tokens, once they are there."""
    longest: int | None = None
    """Tokens of its longest response, once it is there."""
    cut: bool = False
    """It is part of a batch."""

    def age(self, version: int) -> int:
        """Versions that its oldest token is, or may be, behind."""
        return version - (self.version if self.oldest is None else self.oldest)


class Flow:
    """All groups in flight. Whoever leaves does so once, so that nothing is replaced twice."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        """By uid, in the order of admission."""
        self.given_up = Counter[Reason]()
        """Of the whole run."""
        self.admitted = self.refused = 0
        """Since the last batch was cut: admitted, and refused by the gate."""
        self._number = 0

    def admit(self, uids: Iterable[str], version: int, waits: bool = False) -> None:
        """These prompts are in flight from now on; `waits` for those that are never given up for their age."""
        for uid in uids:
            self.groups[uid] = Group(uid, self._number, version, waits)
            self._number += 1
            self.admitted += 1

    def settle(self, uid: str, oldest: int | None = None) -> None:
        """All that a batch needs of a group is there."""
        group = self.groups[uid]
        group.settled, group.oldest = True, group.oldest if oldest is None else oldest

    def cut(self, uids: Iterable[str]) -> None:
        """These are a batch now; they stay in flight until it is trained."""
        for uid in uids:
            self.groups[uid].cut = True
        self.admitted = self.refused = 0

    def give_up(self, uid: str, reason: Reason) -> bool:
        """Take out a group that will not be trained; false where it had left already."""
        if self.groups.pop(uid, None) is None:
            return False
        self.given_up[reason] += 1
        self.refused += reason == "filtered"
        return True

    def trained(self) -> list[str]:
        """Take out the groups of all batches that were cut, and name them."""
        done = self.in_batches
        for uid in done:
            del self.groups[uid]
        return done

    @property
    def in_batches(self) -> list[str]:
        """Groups of the batches of this step."""
        return [group.uid for group in self.groups.values() if group.cut]

    @property
    def waiting(self) -> list[Group]:
        """Groups of no batch yet, in the order of admission."""
        return [group for group in self.groups.values() if not group.cut]

    @property
    def ready(self) -> list[Group]:
        """Those of them that a batch may take."""
        return [group for group in self.waiting if group.settled]

    @property
    def running(self) -> list[Group]:
        """Those of them that are not ready yet."""
        return [group for group in self.waiting if not group.settled]
