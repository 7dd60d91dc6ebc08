"""Trackers beside the run folder: where a run's metrics and samples go."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from flowrl.model import Settings


class MlflowTracking(Settings):
    """Log to MLflow."""

    package: ClassVar[str] = "mlflow"
    """What must be installed."""

    type: Literal["mlflow"] = "mlflow"
    """Kind of tracker."""
    experiment: str | None = None
    """Name of the experiment; null is the pipeline's name."""
    uri: str | None = None
    """Tracking server; null is a local SQLite file."""

    def target(self, name: str) -> tuple[str | None, ...]:
        """Where the values of a pipeline of this name go: no two trackers may share it."""
        return "mlflow", self.uri, self.experiment or name


class TensorboardTracking(Settings):
    """Write event files for TensorBoard."""

    package: ClassVar[str] = "tensorboard"
    """What must be installed."""

    type: Literal["tensorboard"] = "tensorboard"
    """Kind of tracker."""
    dir: str | None = Field(default=None, min_length=1)
    """Folder in which each run gets one of its name; null is `tensorboard` in the run folder."""

    def target(self, name: str) -> tuple[str | None, ...]:
        """Where its files are."""
        return "tensorboard", self.dir


class WandbTracking(Settings):
    """Log to Weights & Biases."""

    package: ClassVar[str] = "wandb"
    """What must be installed."""

    type: Literal["wandb"] = "wandb"
    """Kind of tracker."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """Send as the run goes, keep in the run folder for `wandb sync`, or do nothing."""
    project: str | None = Field(default=None, min_length=1)
    """Name of the project; null is the pipeline's name."""
    entity: str | None = Field(default=None, min_length=1)
    """User or team that the project belongs to; null is the default of the account."""

    def target(self, name: str) -> tuple[str | None, ...]:
        """Where the values of a pipeline of this name go."""
        return "wandb", self.entity, self.project or name


class NoTracking(Settings):
    """Log nowhere but in the run folder."""

    package: ClassVar[str] = ""
    """What must be installed."""

    type: Literal["none"] = "none"
    """Kind of tracker."""


Tracking = MlflowTracking | TensorboardTracking | WandbTracking | NoTracking
TrackingSpec = Annotated[Tracking, Field(discriminator="type")]
EXTRAS = frozenset({"tensorboard", "wandb"})
"""Packages that flowrl brings only where asked for, each by the extra of its name."""
