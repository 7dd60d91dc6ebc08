"""Functions that give rows, none of them as a pipeline needs them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


def words() -> list[dict[str, Any]]:
    return [{"question": "one", "answer": 1}] * 64


def broken() -> Iterator[dict[str, Any]]:
    yield {"prompt": "1+1=", "answer": "2"}
    raise ValueError("the archive is empty")


def chats() -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": "1+1="}]
    return [{"prompt": prompt, "answer": "2"} for prompt in (messages, [], [{"content": "1+1="}], messages * 2)]


def numbers() -> list[dict[str, Any]]:
    return [{"prompt": n, "answer": str(n)} for n in range(64)]


def exits() -> list[dict[str, Any]]:
    os._exit(3)
