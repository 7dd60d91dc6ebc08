"""Names of metrics for trackers that refuse some: mapped to names that they take, different for every name."""

from __future__ import annotations

import re

_NAMED = {"@": "at"}
_CHARACTERS = {"at": "@", "": ""}


def escaped(name: str, refused: re.Pattern[str]) -> str:
    """The name with each refused character as its code point in hexadecimal between colons.

    So `time(s)` becomes `time:28:s:29:`; `@` becomes `:at:`. A pattern must refuse the colon, which is the escape.
    """
    return refused.sub(lambda match: f":{_NAMED.get(match[0]) or format(ord(match[0]), 'x')}:", name) or "::"


def unescaped(name: str) -> str:
    """The name that `escaped` was given."""

    def character(match: re.Match[str]) -> str:
        return _CHARACTERS[match[1]] if match[1] in _CHARACTERS else chr(int(match[1], 16))

    return re.sub(r":([0-9a-z]*):", character, name)
