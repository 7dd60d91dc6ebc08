"""How a problem is shown."""

from __future__ import annotations

import pytest

from flowrl.errors import Place, Problem, closest, nearest


def frame(text: str, column: int, length: int) -> tuple[str, str]:
    shown = Problem("FR001", Place("f", 1, column, length, text), "fact").render().splitlines()
    return shown[1].partition("| ")[2], shown[2].partition("| ")[2]


def test_of_a_long_line_only_the_surroundings_are_shown() -> None:
    text = "x" * 5000 + "wrong" + "y" * 5000
    line, underline = frame(text, 5001, 5)
    assert len(line) <= 162 and line.startswith("…") and line.endswith("…")
    assert line[underline.index("^") : underline.rindex("^") + 1] == "wrong"
    line, underline = frame(text, 1, len(text))
    assert len(line) <= 162 and len(underline) <= 162


@pytest.mark.parametrize("before", ["\tname: ", "a\tb\t", "日本: ", "e\u0301: ", ""])
def test_the_underline_stands_below_the_value(before: str) -> None:
    line, underline = frame(before + "wrong", len(before) + 1, 5)
    columns = sum(2 if letter in "日本" else 0 if letter == "\u0301" else 1 for letter in line.partition("wrong")[0])
    assert underline == " " * columns + "^^^^^"
    assert "\t" not in line


def test_a_place_past_the_end_of_its_line_is_underlined_once() -> None:
    assert frame("abc", 4, 3) == ("abc", "   ^")


def test_the_nearest_name_does_not_mind_case() -> None:
    assert closest("TEMPERATURE", ["temperature", "tags"]) == "temperature"
    assert nearest("exactmatch", ["ExactMatch"]) == "did you mean 'ExactMatch'?"
    assert closest("x", ["temperature"]) == ""
