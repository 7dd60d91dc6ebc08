"""Parquet files: columns from the schema, rows a batch at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from glob import glob, has_magic
from typing import Annotated, Any, Literal

from pydantic import Field

from flowrl.data.arrow import types_of
from flowrl.data.base import DataFault, Text
from flowrl.data.jsonl import no_match, unreadable
from flowrl.data.table import Line, Opened, Table
from flowrl.data.values import as_plain
from flowrl.fields import Dtype

NUM_ROWS_AT_A_TIME = 1024


class Parquet(Table):
    """Rows from Parquet files."""

    type: Literal["parquet"] = "parquet"
    """Kind of data set."""
    path: Text | Annotated[list[Text], Field(min_length=1)]
    """The file, relative to the YAML file that names it; a pattern such as `part-*.parquet`; or a list of either."""

    @property
    def origin(self) -> str:
        """The files as they were written."""
        return self.path if isinstance(self.path, str) else ", ".join(self.path)

    def opened(self, checking: bool) -> Opened:
        """All files, which have the same columns."""
        files = self._files()
        first = self._types_of(files[0])
        for other in files[1:]:
            if (types := self._types_of(other)) != first:
                names = sorted(name for name in {*first, *types} if first.get(name) != types.get(name))
                fact = f"'{files[0]}' and '{other}' differ in the column '{names[0]}'"
                raise DataFault("path", fact, "columns: {NAME: TYPE} reads only what all files have")
        return Opened(self._lines(files), first)

    def _lines(self, files: list[str]) -> Iterator[Line]:
        for path in files:
            number = 0
            for batch in self._batches(path):
                for row in batch.to_pylist():
                    number += 1
                    plain, fault = as_plain(row)
                    yield Line(number, plain, fault, source=path)

    def fingerprint(self) -> str:
        """Of the bytes of the files, wherever they lie, and of what is taken of them."""
        prints = []
        for path in self._files():
            with open(path, "rb") as file:
                prints.append(hashlib.file_digest(file, "sha256").hexdigest())
        return self.digest(*self.taken, *prints)

    def _files(self) -> list[str]:
        found: list[str] = []
        for path in [self.path] if isinstance(self.path, str) else self.path:
            if os.path.exists(path) or not has_magic(path):
                found.append(path)
            elif matches := sorted(glob(path, recursive=True)):
                found += matches
            else:
                raise no_match("path", path)
        return found

    def _file(self, path: str) -> Any:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile

        try:
            with open(path, "rb"):
                return ParquetFile(path)
        except OSError as error:
            raise unreadable(path, error, "a Parquet file") from error
        except (ArrowException, ValueError) as error:
            fix = "give a Parquet file; for JSON Lines, type: jsonl"
            raise DataFault("path", f"'{path}' is no Parquet file: {_first_line(error)}", fix) from error

    def _types_of(self, path: str) -> dict[str, Dtype]:
        with self._file(path) as file:
            return types_of(file.schema_arrow, path, self.columns)

    def _batches(self, path: str) -> Iterator[Any]:
        from pyarrow import ArrowException

        with self._file(path) as file:
            try:
                yield from file.iter_batches(
                    NUM_ROWS_AT_A_TIME, columns=None if self.columns is None else [*self.columns]
                )
            except (ArrowException, OSError) as error:
                fact = f"'{path}' is damaged: {_first_line(error)}"
                raise DataFault("path", fact, "copy it again, or leave it out") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
