"""A model as the document describes it: which weights, whether they train, and with which optimizer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Settings(BaseModel):
    """Base of every section: unknown keys refused, frozen, strict types, no infinity and no NaN."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class OptimizerSpec(Settings):
    """AdamW and the limit on the gradient norm."""

    lr: float = Field(1.0e-6, gt=0)
    """Learning rate."""
    betas: tuple[float, float] = Field((0.9, 0.999), strict=False)
    """Decay of the running means of the gradient and of its square."""
    eps: float = Field(1.0e-8, gt=0)
    """Added to the denominator of the update."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradient norm above which gradients are scaled down; `.inf` switches clipping off."""


class ModelSpec(Settings):
    """One causal language model."""

    path: str = Field(min_length=1)
    """A shipped name (`arith-tiny`), a folder, or a hub id."""
    trainable: bool = False
    """Whether an update node may change the weights."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights in memory."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """Used when the model is trainable."""
