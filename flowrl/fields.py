"""Field types: on which axis a value lives, and of which kind it is.

A field type is written `Axis[dtype]`, for example `Token[float]`. This module knows nothing of arrays; the classes
that hold values are in `flowrl.batch`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["Step", "Prompt", "Sample", "PromptToken", "Token"]
Dtype = Literal["int", "float", "bool", "str", "json"]

AXES: dict[Axis, str] = {
    "Step": "training step",
    "Prompt": "prompt, i.e. group of samples",
    "Sample": "trajectory",
    "PromptToken": "token of the sample's prompt",
    "Token": "token of the response",
}
DTYPES: tuple[Dtype, ...] = ("int", "float", "bool", "str", "json")


@dataclass(frozen=True, order=True)
class FieldType:
    """The type of a field: `FieldType("Sample", "float")` is `Sample[float]`."""

    axis: Axis
    dtype: Dtype

    def __str__(self) -> str:
        return f"{self.axis}[{self.dtype}]"

    @property
    def nullable(self) -> bool:
        """Whether a value may be missing: a reward that could not be scored is null, never 0.0."""
        return self.axis in ("Sample", "Prompt") and self.dtype in ("float", "json")

    def accepts(self, other: FieldType) -> bool:
        """Whether a port of this type may read a field of another: text, numbers and bools are JSON too."""
        return other == self or (other.axis == self.axis and self.dtype == "json")

    def shape(self, num_prompts: int, group_size: int) -> str:
        """Shape for P prompts of n samples; token axes are jagged, their lengths are known only when run."""
        num_samples = num_prompts * group_size
        return {
            "Step": "()",
            "Prompt": f"({num_prompts})",
            "Sample": f"({num_samples})",
            "PromptToken": f"({num_samples}, prompt tokens)",
            "Token": f"({num_samples}, tokens)",
        }[self.axis]


@dataclass(frozen=True)
class Port:
    """A named input or output of a node class."""

    name: str
    type: FieldType
    optional: bool = False
    """The node works without it (`X | None = None` in `run`)."""
    many: bool = False
    """Takes a list of fields (`list[X]` in `run`)."""

    def __str__(self) -> str:
        shown = f"list[{self.type}]" if self.many else str(self.type)
        return f"{self.name}: {shown}" + (" (optional)" if self.optional else "")
