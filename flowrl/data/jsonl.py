"""A user's own file: one JSON object per line, its columns declared from the first lines."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from glob import has_magic
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import Field

from flowrl.data.base import BAD_DATA, DataFault, Placed
from flowrl.data.rows import Row
from flowrl.data.table import Line, Opened, Table
from flowrl.data.values import Wrong
from flowrl.errors import Place, Problem, nearest


class Jsonl(Table):
    """Rows from a JSON Lines file."""

    type: Literal["jsonl"] = "jsonl"
    """Kind of data set."""
    path: str = Field(min_length=1)
    """The file, relative to the YAML file that names it."""

    rows_fix = "one JSON object a line, with the same columns in all of them"

    @property
    def origin(self) -> str:
        """The file."""
        return self.path

    def opened(self, checking: bool) -> Opened:
        """Every line that is not blank."""
        return Opened(self._lines())

    def bad_rows(self, bad: Sequence[tuple[Line, Wrong]], place: Placed) -> list[Problem]:
        """What is wrong with lines, each at its place in the file."""
        texts = ["".join(letter if letter.isprintable() else " " for letter in line.text) for line, _ in bad]
        places = [
            Place(self.path, line.number, 1, max(len(text), 1), text[:160])
            for (line, _), text in zip(bad, texts, strict=True)
        ]
        return [
            Problem(BAD_DATA, where, f"bad line: {wrong.fact}", wrong.fix or self.rows_fix)
            for where, (_, wrong) in zip(places, bad, strict=True)
        ]

    def fingerprint(self) -> str:
        """Of the bytes of the file, wherever it lies, and of what is taken of them."""
        with open(self.path, "rb") as file:
            return self.digest(*self.taken, hashlib.file_digest(file, "sha256").hexdigest())

    def _lines(self) -> Iterator[Line]:
        try:
            if "\0" in self.path:
                raise OSError(errno.EINVAL, "no path holds the character NUL")
            with open(self.path, "rb") as file:
                for number, raw in enumerate(file, start=1):
                    line = _parse(number, raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw)
                    if line.text.strip() or line.wrong:
                        yield line
        except OSError as error:
            raise unreadable(self.path, error, "a JSONL file") from error


def unreadable(path: str, error: OSError, what: str) -> DataFault:
    """A file of data that cannot be read, with the nearest name beside it."""
    wanted = Path(path)
    beside = [other.name for other in wanted.parent.glob(f"*{wanted.suffix}")] if error.errno == errno.ENOENT else []
    if error.errno == errno.ENOENT and has_magic(path):
        fix = "path: one file; several are read by {type: hf, path: json, data_files: PATTERN}"
        return DataFault("path", f"there is no file '{path}', and a pattern is none", fix)
    fix = nearest(wanted.name, beside) or f"path: {what}, relative to the YAML file that names it"
    return DataFault("path", f"cannot read '{path}': {error.strerror or error}", fix)


def no_match(key: str, pattern: str) -> DataFault:
    """A pattern that no file has, with the nearest name that one has."""
    folder, name = os.path.split(pattern)
    suffix = os.path.splitext(name)[1]
    beside = [one for one in os.listdir(folder or ".") if one.endswith(suffix)] if os.path.isdir(folder or ".") else []
    fix = nearest(name, beside) or f"{key}: files or a pattern, relative to the YAML file that names them"
    return DataFault(key, f"no file matches '{pattern}'", fix)


def _parse(number: int, raw: bytes) -> Line:
    text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
    if not text.strip():
        return Line(number, {})
    try:
        raw.decode("utf-8")
        row = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        return Line(number, {}, Wrong(f"not UTF-8 text at byte {error.start}", "save the file as UTF-8"), text)
    except json.JSONDecodeError as error:
        return Line(number, {}, Wrong(f"not JSON: {error.msg} at column {error.colno}"), text)
    except (ValueError, RecursionError) as error:
        return Line(number, {}, Wrong(f"not JSON: {error}"), text)
    if not isinstance(row, dict):
        return Line(number, {}, Wrong("not an object of columns and values"), text)
    return Line(number, row, None, text)


def _object(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object in which a key stands once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key '{twice}' stands twice in one object")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number; write null for a missing one")
