"""The table of samples in the run folder: `samples/step_000001.parquet`, one file a step that has one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from flowrl.schedule.record import Samples, Status
from flowrl.track.tracker import Complain, Point, Service

ARROW = {"int": "int64", "float": "float64", "bool": "bool", "str": "string"}


class SampleFiles(Service):
    """Parquet files in a folder; a file is whole or not there."""

    local = True

    def __init__(self, folder: Path, resumed_after: int | None = None) -> None:
        """`resumed_after` is the step after which a resumed run goes on: tables of later steps are removed."""
        self._folder, self._resumed_after = folder, resumed_after
        self.shown = f"the samples in {folder}"

    def connect(self, run_id: str, complain: Complain) -> str:
        """Clear the folder of what will come again; it is made with the first table."""
        for path in self._folder.glob("step_*.parquet") if self._resumed_after is not None else ():
            step = re.fullmatch(r"step_(\d+)", path.stem)
            if step and int(step[1]) > (self._resumed_after or 0):
                path.unlink()
        return ""

    def send(self, points: Sequence[Point]) -> None:
        """Metrics have a file of their own."""

    def show(self, samples: Samples) -> None:
        """Write one file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        arrays = {
            name: pa.array(values, pa.type_for_alias(ARROW[samples.types[name]]))
            for name, values in samples.columns.items()
        }
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"step_{samples.step:06d}.parquet"
        new = path.with_name(f".{path.name}")  # readers of the folder pass over it
        pq.write_table(pa.table(arrays), new)
        os.replace(new, path)

    def end(self, status: Status) -> None:
        """Every file is whole already."""
