"""Syntax, refused features and positions of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowrl.errors import Problem
from flowrl.spec.load import MAX_VALUES, load_text
from flowrl.spec.read import read_document
from flowrl.spec.scalars import resolve
from flowrl.spec.tree import Source, locate, plain


def underlined(problem: Problem) -> str:
    start = problem.place.column - 1
    return problem.place.text[start : start + problem.place.length]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6), ("1e6", 1e6), ("2e+5", 2e5), ("1.0e-6", 1e-6), (".5", 0.5), ("3.", 3.0), ("-3", -3),
        ("017", 17), ("0o17", 15), ("0x1F", 31), ("off", "off"), ("yes", "yes"), ("1_000", "1_000"), ("12:30", "12:30"),
        ("", None), ("~", None), ("null", None), ("true", True), ("False", False), ("none", "none"), ("3 4", "3 4"),
        ("-.inf", float("-inf")), ("0b11", "0b11"), ("=", "="), ("v1.0", "v1.0"),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


def test_nan_and_absurd_numbers_are_floats() -> None:
    assert resolve(".nan") != resolve(".nan")
    assert resolve("9" * 5000) == float("inf")


def test_quoted_numbers_and_dates_stay_strings() -> None:
    tree, problems = load_text("a: '3'\nb: \"2024-01-01\"\nc: '<<'\n'1': x\nd: |\n  3\n", Source("f"))
    assert not problems
    assert tree is not None
    assert plain(tree) == {"a": "3", "b": "2024-01-01", "c": "<<", "1": "x", "d": "3\n"}


def test_import_paths_with_colons_stand_in_flow_mappings() -> None:
    tree, problems = load_text("a: {use: ./my_nodes.py:LengthPenalty, b: [p.q:X]}", Source("f"))
    assert not problems
    assert tree is not None
    assert plain(tree) == {"a": {"use": "./my_nodes.py:LengthPenalty", "b": ["p.q:X"]}}


def test_every_key_and_value_has_its_place() -> None:
    text = "ä: {b: [1, 22], 'c': x}\nd:\n  e: |\n    long\n"
    tree, _ = load_text(text, Source("f.yaml", text.splitlines()))
    assert tree is not None
    place = locate(tree, ("ä", "b", 1)).place(("ä", "b", 1))
    assert (place.line, place.column, place.length, place.path) == (1, 12, 2, "ä.b[1]")
    assert str(place) == "f.yaml:1:12"
    assert locate(tree, ("ä", "c"), key=True)[1:] == (1, 17, 3)
    assert locate(tree, ("d", "e"))[1:3] == (3, 6)
    assert locate(tree, ("d", "nothing", "more"))[1:] == (2, 1, 1), "the key of the nearest ancestor"


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("a: [1\nb: 2", 2, 2, "opens in line 1"),
        ("a: 1\n  b: 2", 2, 4, "mapping values are not allowed"),
        ('a: "x\nb: 1\n', 1, 4, "while scanning a quoted scalar"),
        ("a:\n\tb: 1", 2, 1, "a tab cannot be used"),
        ("a: @x", 1, 4, "cannot start any token"),
        ("a: *x", 1, 4, "undefined alias"),
        ("a: 1\n---\nb: 2", 2, 1, "another document"),
        ("a: {b: 1", 1, 4, "while parsing a flow mapping"),
        ("a: 1\nb: \x01", 2, 4, "U+0001"),
        ("é: 1\né😀: \x01", 2, 5, "U+0001"),
        ('a: "\\q"', 1, 5, "unknown escape"),
    ],
)
def test_a_syntax_error_names_its_line_and_column(
    tmp_path: Path, text: str, line: int, column: int, words: str
) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    reading = read_document(path)
    (problem,) = reading.problems
    assert (problem.code, problem.place.line, problem.place.column) == ("FR002", line, column)
    assert words in problem.fact
    assert problem.fix
    assert reading.document is None


@pytest.mark.parametrize(
    ("text", "what"), [("", "empty"), ("# only\n", "empty"), ("- 1\n", "a list"), ("x\n", "a single")]
)
def test_a_document_must_be_a_mapping(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    (problem,) = read_document(path).problems
    assert problem.code == "FR002"
    assert what in problem.fact


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "grpo_sync.yaml").write_text("")
    (problem,) = read_document(tmp_path / "grpo_snyc.yaml").problems
    assert problem.code == "FR001"
    assert "No such file" in problem.fact
    assert problem.fix == "did you mean 'grpo_sync.yaml'?"


def test_a_folder_or_a_file_of_bytes_is_no_document(tmp_path: Path) -> None:
    assert read_document(tmp_path).problems[0].code == "FR001"
    (tmp_path / "b.yaml").write_bytes(b"a: \xff\xfe")
    (problem,) = read_document(tmp_path / "b.yaml").problems
    assert problem.code == "FR001"
    assert "UTF-8" in problem.fact


def test_all_repeated_keys_are_reported_and_the_first_one_counts() -> None:
    text = "a: 1\nb: {c: 1, c: 2, d: {e: 1, e: 1}}\na: 3\n'a': 4\n"
    tree, problems = load_text(text, Source("f", text.splitlines()))
    assert [problem.code for problem in problems] == ["FR003"] * 4
    assert [(problem.place.line, problem.place.column) for problem in problems] == [(2, 11), (2, 27), (3, 1), (4, 1)]
    assert [problem.place.path for problem in problems] == ["b.c", "b.d.e", "a", "a"]
    assert "first in line 1" in problems[-1].fact
    assert tree is not None
    assert plain(tree) == {"a": 1, "b": {"c": 1, "d": {"e": 1}}}


@pytest.mark.parametrize(
    ("text", "frame", "words"),
    [
        ("a: 2024-01-01", "2024-01-01", "date"),
        ("a: {p: 1}\n<<: {q: 1}", "<<", "extends"),
        ("a: !foo {x: 1}", "!foo {x: 1}", "tag !foo"),
        ("a: !!int '3'", "!!int '3'", "tag !!int"),
        ("a: !!python/object:x 1", "!!python/object:x 1", "tag !!python/object:x"),
        ("1: x", "1", 'write "1"'),
        ("true: x", "true", "not a string"),
        ("[a]: 3", "[a]", "cannot be a key"),
        ("a: {2024-01-01: 3}", "2024-01-01", "not a string"),
        ("~: 3", "~", "not a string"),
    ],
)
def test_features_that_surprise_are_refused_where_they_stand(text: str, frame: str, words: str) -> None:
    _, problems = load_text(text, Source("f", text.splitlines()))
    assert [problem.code for problem in problems] == ["FR004"]
    assert underlined(problems[0]) == frame
    assert words in problems[0].fact + problems[0].fix


def test_plain_aliases_are_allowed() -> None:
    tree, problems = load_text("a: &x {p: 1}\nb: *x\nc: [*x]", Source("f"))
    assert not problems
    assert tree is not None
    assert plain(tree) == {"a": {"p": 1}, "b": {"p": 1}, "c": [{"p": 1}]}


@pytest.mark.parametrize("text", ["a: &x [*x]", "a: &x {b: *x, c: *x}"])
def test_an_alias_inside_its_own_anchor_is_refused(text: str) -> None:
    tree, problems = load_text(text, Source("f", [text]))
    assert tree is None
    assert [problem.code for problem in problems] == ["FR004"]


def test_aliases_that_unfold_without_end_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)
    ]
    _, problems = load_text("\n".join(lines), Source("f", lines))
    assert [problem.code for problem in problems] == ["FR004"]
    assert str(MAX_VALUES) in problems[0].fact


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes("\ufeffflowrl: 1\r\nnmae: x\r\n".encode())
    problem = next(problem for problem in read_document(path).problems if problem.code == "FR005")
    assert (problem.place.line, problem.place.column, problem.place.text) == (2, 1, "nmae: x")
