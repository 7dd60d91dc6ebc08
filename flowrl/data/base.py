"""What every data set offers: columns known before it is loaded, cheap checks, rows, a fingerprint.

A new kind is a subclass with a `type` of its own, named in `flowrl.spec.document.DataSpec`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from flowrl.errors import Place, Problem
from flowrl.fields import FieldType
from flowrl.model import Settings

Row = dict[str, Any]

BAD_DATA = "FR018"
"""Code of the problems of data files."""


class DataSet(Settings, ABC):
    """Rows of prompts."""

    shuffle: bool = True
    """Take the rows in another order each epoch, derived from the seed of the run."""

    @abstractmethod
    def columns(self) -> dict[str, FieldType]:
        """The fields that the rows give, all on the axis `Prompt`."""

    @abstractmethod
    def problems(
        self, place: Callable[[str], Place], num_needed: int = 1, lower: str = "batch.prompts"
    ) -> list[Problem]:
        """What can be found wrong without reading everything; `place` says where a key of the set stands.

        `num_needed` is the least number of rows: a batch must not hold the same row twice. `lower` names the settings
        that it follows from.
        """

    @abstractmethod
    def load(self) -> Sequence[Row]:
        """All rows. Raises `PipelineError` with every bad line."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Changes when the rows change: a resumed run must not apply an old position to other data."""
