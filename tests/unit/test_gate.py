"""Gates and when they give up."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from pydantic import ValidationError
from stub_nodes import Gate as PlainNode

from flowrl import Gate, Prompt, Sample
from flowrl.gate import GateLimits, limits_of


class Solved(Gate):
    """A gate of a user's own."""

    best: float = 1.0

    class Out(NamedTuple):
        keep: Prompt[bool]

    def run(self, reward: Sample[float]) -> Out:
        return self.Out(reward.mean("prompt") < self.best)


def test_a_gate_of_ones_own_has_the_settings_that_say_when_to_give_up() -> None:
    gate = Solved(best=0.5, max_rounds=3, when_short="skip")
    assert limits_of(gate) == GateLimits(3, "skip")
    assert gate.scope == "group"
    with pytest.raises(ValidationError):
        Solved(max_rounds=0)


def test_any_other_node_has_their_defaults() -> None:
    assert limits_of(PlainNode()) == limits_of(Solved()) == GateLimits(10, "fail")
