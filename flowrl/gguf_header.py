"""What a GGUF file says of itself: its metadata and the sizes of its tensors, without reading one of them.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The library `gguf` reads the same with every word
of the vocabulary and needs two seconds for it, which is more than a check may take.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

MAGIC = b"GGUF"
_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Of values of fixed size, by the number of their type."""
_STRING, _ARRAY = 8, 9

Value = int | float | bool | str


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key, an array as the number of its items; and the number of values of each tensor by name."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, int]

    def of_model(self, key: str) -> Value | None:
        """A value of the model's own section: `block_count` is `llama.block_count` in a Llama."""
        return self.metadata.get(f"{self.metadata.get('general.architecture')}.{key}")


def read_header(path: Path) -> GgufHeader:
    """The header of a file. Raises `OSError`, or `ValueError` for one of another kind and for one that is cut off."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin as a GGUF file does")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _header(_Cursor(data, len(MAGIC)))
            except (struct.error, UnicodeDecodeError, KeyError, OverflowError) as error:
                raise ValueError("its header is cut off or broken") from error


class _Cursor:
    """A position in the bytes of a file."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data, self._position = data, position

    def number(self, kind: str) -> int | float | bool:
        """The next number, in a format of `struct`."""
        (value,) = struct.unpack_from(kind, self._data, self._position)
        self._position += struct.calcsize(kind)
        number: int | float | bool = value
        return number

    def whole(self, kind: str = "<Q") -> int:
        """The next number, where it is a count."""
        return int(self.number(kind))

    def text(self) -> str:
        """The next string."""
        return self._taken(self.whole()).decode("utf-8")

    def value(self) -> Value:
        """The next value of the metadata; an array becomes the number of its items."""
        kind = self.whole("<I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        kind, length = self.whole("<I"), self.whole()
        if kind == _STRING:
            for _ in range(length):
                self._skip(self.whole())
        else:
            self._skip(length * struct.calcsize(_FORMATS[kind]))
        return length

    def _taken(self, length: int) -> bytes:
        start = self._position
        self._skip(length)
        return self._data[start : self._position]

    def _skip(self, length: int) -> None:
        self._position += length
        if self._position > len(self._data):
            raise struct.error("beyond the end of the file")


def _header(cursor: _Cursor) -> GgufHeader:
    version = cursor.whole("<I")
    if version not in (2, 3):
        raise ValueError(f"it is of version {version} of the format; versions 2 and 3 can be read")
    num_tensors, num_values = cursor.whole(), cursor.whole()
    metadata = {cursor.text(): cursor.value() for _ in range(num_values)}
    tensors: dict[str, int] = {}
    for _ in range(num_tensors):
        name = cursor.text()
        tensors[name] = prod(cursor.whole() for _ in range(cursor.whole("<I")))
        cursor.whole("<I")  # type of its values
        cursor.whole()  # where they lie
    return GgufHeader(metadata, tensors)
