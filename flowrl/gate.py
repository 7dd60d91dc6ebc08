"""Gates: nodes that say which prompt groups are trained on, so that what they depend on runs again for the others.

    nodes:
      informative: {use: filter.informative, gate: keep, max_rounds: 10, when_short: fail}

Any node that writes a `Prompt[bool]` can be the gate of a pipeline. One that derives from `Gate` also has the settings
that say when to give up; another is treated as if it had their defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from flowrl.node import Node

WhenShort = Literal["fail", "short", "skip"]


class Gate(Node):
    """Base of nodes that write one `Prompt[bool]` field, which `gate:` names: the groups to keep."""

    scope = "group"

    max_rounds: int = Field(10, ge=1)
    """Batches of prompts that are tried for one batch of kept groups, the first one included."""
    when_short: WhenShort = "fail"
    """What happens when these do not suffice: the run fails, a short batch is trained, or the step trains nothing."""


@dataclass(frozen=True)
class GateLimits:
    """When to give up on filling a batch, and what to do then."""

    max_rounds: int
    when_short: WhenShort


def limits_of(node: Node) -> GateLimits:
    """Those of a gate's settings, or the defaults of `Gate` for a node of another class."""
    gate = node if isinstance(node, Gate) else Gate()
    return GateLimits(gate.max_rounds, gate.when_short)
