"""Advantages in units of what is usual in a group: the settings of nodes that may divide by its deviation."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from flowrl.model import SettingError
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores
from flowrl.rows import Array


class Normalizing(Node):
    """Base of what compares the sessions of a group and may divide by their standard deviation."""

    compares_samples = True

    normalize: Literal["std", "none"] = "std"
    """Divide by the standard deviation of the group's rewards, or do not."""
    epsilon: float = Field(1.0e-6, ge=0)
    """Added to the standard deviation."""

    @model_validator(mode="after")
    def _epsilon_counts(self) -> Self:
        if self.normalize == "none" and self.epsilon != type(self).model_fields["epsilon"].default:
            fact = "epsilon has no effect with normalize: none"
            raise SettingError(("epsilon", "normalize"), fact, "normalize: std, or leave epsilon out")
        return self

    def normalized(self, scores: Scores, advantages: Array) -> Array:
        """Advantages of sessions (S,), divided if that is wished; what is 0 stays so."""
        return scores.divided_by_std(advantages, self.epsilon) if self.normalize == "std" else advantages
