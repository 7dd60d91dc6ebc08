"""JSON from whatever nodes hand over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.encode import dumps, plain


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.bool_(True), True),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.longdouble(0.5), 0.5),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([1.0, np.nan, np.inf]), [1.0, None, None]),
        (float("-inf"), None),
        (np.float64("nan"), None),
        (np.str_("text"), "text"),
        ({1: (1, 2), "b": {"c": np.float64(1)}}, {"1": [1, 2], "b": {"c": 1.0}}),
        ("a\ud800b", "a?b"),
        ({"\ud800": 1}, {"?": 1}),
        (Path("a/b"), "a/b"),
        ("ü€😀", "ü€😀"),
        (10**30, 10**30),
    ],
)
def test_values_become_native_json(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert json.loads(dumps(value)) == expected
    assert type(plain(value)) is type(expected)


def test_an_unknown_object_is_shown_not_refused() -> None:
    assert "object at" in json.loads(dumps({"x": object()}))["x"]


def test_one_line_that_can_be_written_as_utf8() -> None:
    text = dumps(["line\nbreak", "\udfff"])
    assert "\n" not in text
    text.encode("utf-8")
