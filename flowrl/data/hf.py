"""Data sets of the Hugging Face hub, and local files, through the library `datasets`.

`check` never asks the hub: it knows the columns of local files, of what is in the library's cache, and of what
`columns:` declares.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from glob import glob, has_magic
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from flowrl.data.arrow import types_of
from flowrl.data.base import DataFault
from flowrl.data.jsonl import no_match
from flowrl.data.streamed import StreamedTable
from flowrl.data.table import Line, Opened
from flowrl.data.values import as_plain
from flowrl.errors import closest
from flowrl.model import SettingError

if TYPE_CHECKING:
    import datasets

    Found: TypeAlias = datasets.Dataset | datasets.IterableDataset

LOADERS = ("json", "csv", "parquet", "text", "arrow", "xml", "webdataset")
"""What `path` may be for files that `data_files` names."""
JSON_BLOCK = 10 << 20
"""Bytes of a JSON file that the library looks at for the types of its columns."""
HUB_SECONDS = 5.0
"""How long the hub may take to say that it is there; the library itself would try for half a minute."""


class Hf(StreamedTable):
    """Rows from a data set of the Hugging Face hub, or from local files that `datasets` can read."""

    type: Literal["hf"] = "hf"
    """Kind of data set."""
    path: str = Field(min_length=1)
    """A hub id such as `openai/gsm8k`, a local folder, or a loader (`json`, `csv`, `parquet`, …) for `data_files`."""
    name: str | None = None
    """Configuration of the data set, such as `main`."""
    split: str = Field(default="train", min_length=1)
    """Which part of it; `train[:1000]` is its first rows."""
    revision: str | None = None
    """Commit, tag or branch on the hub; null is the newest."""
    data_files: str | list[str] | dict[str, str | list[str]] | None = None
    """Files to read: with a loader relative to the YAML file that names them, else inside the data set."""

    @model_validator(mode="after")
    def _files_have_neither_name_nor_revision(self) -> Self:
        for key in ("name", "revision"):
            if self.path in LOADERS and getattr(self, key) is not None:
                fact = f"the loader '{self.path}' reads files, which have no {key}"
                raise SettingError((key, "path"), fact, f"remove `{key}:`, or give path: a data set of the hub")
        return self

    @property
    def origin(self) -> str:
        """Path, configuration and split."""
        return " ".join(filter(None, [self.path, self.name, self.split]))

    @property
    def is_local(self) -> bool:
        """Whether no hub is asked."""
        return self.path in LOADERS or os.path.isabs(self.path)

    @property
    def read_by_check(self) -> bool:
        """Declared columns are believed: to import `datasets` takes most of a second."""
        return self.columns is None

    def opened(self, checking: bool) -> Opened:
        """The split; a check takes what is here and asks no hub."""
        if checking and (plain := self._plainly()):
            return plain
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise DataFault("type", "the package 'datasets' is not installed", "pip install datasets") from error
        datasets.disable_progress_bars()
        datasets.logging.set_verbosity_error()
        found = self._local(checking) if self.is_local else self._of_the_hub(checking)
        features = found.features
        types = None if features is None else types_of(features.arrow_schema, self.origin, self.columns)
        if self.columns is not None:
            found = found.select_columns([*self.columns])
        return Opened(self._lines(found), types)

    def _lines(self, found: Iterable[Any]) -> Iterator[Line]:
        try:
            for number, row in enumerate(found, 1):
                yield Line(number, *as_plain(row))
        except Exception as error:  # the library's own, those of file formats and of the network
            fact = f"'{self.origin}' cannot be read: {_said(error)}"
            raise DataFault("path", fact, "correct the file that is meant, or leave it out of data_files") from error

    def _plainly(self) -> Opened | None:
        """Files of the loader `json`, read as the library reads them but without it: its import takes a second.

        None for whatever only the library can read.
        """
        from pyarrow import json

        files = [self.data_files] if isinstance(self.data_files, str) else self.data_files
        if self.path != "json" or self.split != "train" or not isinstance(files, list):
            return None
        try:
            readers = [json.open_json(file, json.ReadOptions(block_size=JSON_BLOCK)) for file in files]
        except (OSError, ValueError):
            return None
        if any(reader.schema != readers[0].schema for reader in readers):
            return None
        rows = (row for reader in readers for batch in reader for row in batch.to_pylist())
        return Opened(self._lines(rows), types_of(readers[0].schema, self.origin, self.columns))

    def _local(self, checking: bool) -> Found:
        if self.path in LOADERS and self.data_files is None:
            raise DataFault("path", f"the loader '{self.path}' needs files to read", "data_files: FILE")
        for pattern in _texts(self.data_files) if self.path in LOADERS else ():
            if "://" not in pattern and has_magic(pattern) and not glob(pattern, recursive=True):
                raise no_match("data_files", pattern)
        if self.path not in LOADERS and not os.path.exists(self.path):
            raise DataFault("path", f"there is no folder '{self.path}'", "path: a folder, a hub id or a loader")
        # Streamed, no copy of the files is made in the cache; but a part of a split cannot be.
        return self._loaded(streaming=self.streaming or (checking and "[" not in self.split))

    def _of_the_hub(self, checking: bool) -> Found:
        if self.data_files is not None and "/" not in self.path and (near := closest(self.path, LOADERS)):
            raise DataFault("path", f"there is no loader '{self.path}'", f"did you mean '{near}'?")
        if checking:
            found = self._cached()
            if found is None:
                fact = f"'{self.path}' is not in the cache of this machine, so its columns are not known"
                raise DataFault("path", fact, "declare them, for example columns: {question: str, answer: str}")
            return found
        if unreachable := self._unreachable():
            found = self._cached()
            if found is None:
                fact = (
                    f"'{self.path}' is not in the cache of this machine, and the hub cannot be reached: {unreachable}"
                )
                fix = "run where there is a network, or give path: a folder or a loader with data_files"
                raise DataFault("path", fact, fix)
            return found
        return self._loaded(streaming=self.streaming)

    def _loaded(self, streaming: bool) -> Found:
        from datasets import load_dataset

        try:
            found: Found = load_dataset(
                self.path, self.name, split=self.split, revision=self.revision, data_files=self.data_files,
                streaming=streaming,
            )  # fmt: skip
        except Exception as error:  # the library's own, and those of file formats
            key = "split" if "split" in str(error).lower() else "name" if "config" in str(error).lower() else "path"
            fixes = {"split": "split: a part that it has", "name": "name: a configuration that it has"}
            fix = fixes.get(key, "data_files: files that are there, of the kind that the loader reads")
            raise DataFault(key, f"'{self.origin}' cannot be read: {_said(error)}", fix) from error
        return found

    def _cached(self) -> Found | None:
        """The split as the library has prepared it before; None where it has not."""
        from datasets.packaged_modules.cache.cache import Cache

        files = {} if self.data_files is None else {"data_files": self.data_files}
        name = self.path.rpartition("/")[2]
        try:
            builder: Any = Cache(
                repo_id=self.path, dataset_name=name, config_name=self.name, version="auto", hash="auto", **files
            )
            found: Found = builder.as_dataset(split=self.split)
        except Exception as error:  # the library's own, and those of damaged files
            if "find cache" in str(error) and "Available" not in str(error):
                return None
            fact = f"the cache has no '{self.origin}': {_said(error)}"
            raise DataFault(
                "name", fact, "take a name and a split that it has, or run where there is a network"
            ) from error
        return found

    def _unreachable(self) -> str:
        """Why the hub does not answer; empty when it does. Raises `DataFault` for a set that it does not have."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            HfApi().dataset_info(self.path, revision=self.revision, timeout=HUB_SECONDS)
        except (HfHubHTTPError, HFValidationError) as error:
            fact = f"the hub does not give '{self.path}': {_said(error)}"
            raise DataFault(
                "path", fact, "correct the name, or log in with `hf auth login` if it is not public"
            ) from error
        except Exception as error:  # of whatever carries its requests
            return _said(error)
        return ""


def _texts(files: Any) -> Iterator[str]:
    """The texts in a list or a mapping of them."""
    if isinstance(files, str):
        yield files
    for one in files.values() if isinstance(files, dict) else files if isinstance(files, list) else ():
        yield from _texts(one)


def _said(error: BaseException) -> str:
    """The first line of the innermost cause: what the library says around it is about itself."""
    while (cause := error.__cause__) is not None:
        error = cause
    return (str(error).strip() or type(error).__name__).partition("\n")[0]
