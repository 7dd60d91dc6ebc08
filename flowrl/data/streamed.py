"""Data sets that may be read while the run takes their rows, for sources that are long or endless."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from flowrl.data.table import Table
from flowrl.model import SettingError


class StreamedTable(Table):
    """A table that may be read while the run takes its rows."""

    streaming: bool = False
    """Read rows when the run comes to them, for long or endless sources; those read are kept for later epochs."""
    buffer: int = Field(default=1000, ge=1)
    """With `streaming`: rows that are shuffled with each other."""

    @model_validator(mode="after")
    def _a_buffer_is_of_a_stream(self) -> Self:
        if not self.streaming and self.buffer != type(self).model_fields["buffer"].default:
            fact = "`buffer` has no effect where all rows are read before the run"
            raise SettingError(("buffer", "streaming"), fact, "streaming: true, or remove `buffer:`")
        return self

    @property
    def window(self) -> int | None:
        """The buffer of a stream."""
        return self.buffer if self.streaming else None
