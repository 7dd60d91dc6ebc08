"""The final answer in the text of a response, by the marks that data sets and models of mathematics share."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds that is closed; None without one."""
    for box in reversed(list(BOX.finditer(text))):
        if (content := _braced(text[box.end() :])) is not None:
            return content
    return None


def marked(text: str) -> str:
    """What stands behind the last `####`, or the whole text."""
    return text.rpartition("####")[2].strip()


def _braced(text: str) -> str | None:
    """What stands before the brace that closes; None where it is missing, as in a response that was cut off."""
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return text[:position]
    return None
