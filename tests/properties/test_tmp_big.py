"""Documents, overlays and dumps of any shape."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.pipeline import Pipeline, load
from flowrl.spec.dump import dump_resolved, dump_yaml
from flowrl.spec.load import from_python, load_text
from flowrl.spec.merge import merge
from flowrl.spec.read import read_document, read_value
from flowrl.spec.tree import Source, Span, Tree, plain, without_nulls

SPAN = Span(Source("f"))
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3))
NAMES = st.sampled_from(["a", "b", "c", "use", "type", "mode"])
LEAVES = st.none() | st.integers(0, 3) | st.sampled_from(["x", "y"])
MAPPINGS = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=3)), max_size=4
)

GOOD: dict[str, Any] = {
    "flowrl": 1,
    "name": "small",
    "models": {"policy": {"path": "arith-tiny", "trainable": True, "optimizer": {"lr": 1e-6, "betas": [0.9, 0.99]}}},
    "data": {"train": {"type": "arithmetic", "size": 64}, "val": {"type": "arithmetic"}},
    "batch": {"prompts": 4, "group": 2},
    "pools": {"train": {"workers": 1}, "generate": {"shares": "train"}},
    "nodes": {"rollout": {"use": "rollout.generate", "model": "policy", "tags": ["x"], "reads": {"a": ["b"]}}},
    "schedule": {"mode": "colocate_async", "max_staleness": 2},
    "run": {"steps": 3},
    "tracking": [{"type": "mlflow"}],
}


def tree_of(data: Any) -> Tree:
    tree = from_python(data, SPAN).tree
    assert tree is not None
    return tree


@given(VALUES)
def test_what_is_dumped_reads_back_equal(value: Any) -> None:
    tree, problems = load_text(dump_yaml({"k": value}), Source("f"))
    assert not problems
    assert tree is not None
    assert plain(tree) == {"k": value}
    assert repr(plain(tree)) == repr({"k": value}), "types too"


@given(MAPPINGS)
def test_nothing_and_itself_are_neutral_overlays(data: dict[str, Any]) -> None:
    base = without_nulls(tree_of(data))
    assert plain(merge(base, tree_of({}))) == plain(base)
    assert plain(merge(base, base)) == plain(base)
    assert plain(merge(tree_of({}), base)) == plain(base)


@given(MAPPINGS, MAPPINGS)
def test_an_overlay_laid_on_twice_is_laid_on_once(data: dict[str, Any], over: dict[str, Any]) -> None:
    once = merge(tree_of(data), tree_of(over))
    assert plain(without_nulls(merge(once, tree_of(over)))) == plain(without_nulls(once))


VALUES_BELOW = st.dictionaries(st.sampled_from("abc"), st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2))
SECTIONS = st.recursive(
    VALUES_BELOW,
    lambda inner: st.builds(lambda a, b: {**a, **b}, VALUES_BELOW, st.dictionaries(st.sampled_from("STU"), inner)),
)
"""Documents of which each name is a value or a section in all of them."""


@given(SECTIONS, SECTIONS, SECTIONS)
def test_overlays_that_remove_nothing_may_be_merged_first(a: Any, b: Any, c: Any) -> None:
    one, two, three = tree_of(a), tree_of(b), tree_of(c)
    assert plain(merge(merge(one, two), three)) == plain(merge(one, merge(two, three)))


@given(MAPPINGS, MAPPINGS)
def test_an_overlay_has_the_last_word(data: dict[str, Any], over: dict[str, Any]) -> None:
    merged = plain(without_nulls(merge(tree_of(data), tree_of(over))))

    def stands(wanted: Any, found: Any) -> bool:
        if not isinstance(wanted, dict):
            return bool(wanted == found)
        return all(name not in found if value is None else stands(value, found[name]) for name, value in wanted.items())

    assert stands(over, merged)


PATHS = [
    ("flowrl",), ("name",), ("models",), ("models", "policy"), ("models", "policy", "optimizer", "lr"),
    ("models", "policy", "optimizer", "betas"), ("data",), ("data", "train"), ("data", "train", "type"),
    ("batch", "prompts"), ("pools", "generate"), ("pools", "train", "workers"), ("nodes",), ("nodes", "rollout"),
    ("nodes", "rollout", "use"), ("nodes", "rollout", "tags"), ("nodes", "rollout", "reads"), ("schedule",),
    ("schedule", "mode"), ("schedule", "max_staleness"), ("run",), ("run", "steps"), ("tracking",), ("checkpoint",),
    ("unknown",), ("run", "unknown"), ("nodes", "rollout", "reads", "a"),
]  # fmt: skip


@settings(deadline=None, max_examples=3000, derandomize=False)
@given(st.dictionaries(st.sampled_from(PATHS), VALUES, max_size=4))
def test_any_values_anywhere_are_judged_and_what_is_right_reads_back(changes: dict[tuple[str, ...], Any]) -> None:
    data = copy.deepcopy(GOOD)
    for path, value in changes.items():
        here = data
        for part in path[:-1]:
            here = here.setdefault(part, {}) if isinstance(here.get(part, {}), dict) else {}
        here[path[-1]] = value
    reading = read_value(data)
    for problem in reading.problems:
        assert problem.fact
        assert problem.render()
    if reading.problems:
        assert reading.document is None or reading.broken or {p.code for p in reading.problems} <= {"FR005", "FR018"}
        return
    assert reading.document is not None
    text = dump_resolved(reading.document)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "p.yaml"
        path.write_text(text, encoding="utf-8")
        again = read_document(path)
    assert again.problems == ()
    assert again.document == reading.document


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet=st.sampled_from("ab:-{}[]'\"#&*!|>%@`$ \n\t,?1.<~é\ufeff"), max_size=40))
def test_any_text_gives_problems_and_never_an_exception(text: str) -> None:
    tree, problems = load_text(text, Source("f", text.splitlines()))
    assert tree is not None or problems
    for problem in problems:
        assert problem.place.line >= 1
        assert problem.place.column >= 1
        assert problem.render()


# `--set` is editing.

DEFAULT = Path(__file__).parents[2] / "pipelines" / "grpo_sync.yaml"
TREE = load_text(DEFAULT.read_text(), Source("f", DEFAULT.read_text().splitlines())).tree
assert TREE is not None
DATA: dict[str, Any] = plain(TREE)
EDITS = st.sampled_from(
    ["null", "3", "0", "-1", "1.5", "true", "sync", "policy", "train", "reward", "$base", "$x", "arith-tiny", "jsonl",
     "reward.exact_match", "update.policy", "nothing.of.this", "'3'", "[]", "[reward]", "[1, null]", "{}", "{a: 1}",
     "{use: reward.exact_match}", "{workers: 2}", "{mode: separate_async}", "{lr: 0.1, eps: null}"]
)  # fmt: skip


def all_paths(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where there is a value, and beside it where there is none."""
    if not isinstance(value, dict):
        return [path]
    below = [found for name, item in value.items() for found in all_paths(item, (*path, name))]
    return [*below, (*path, "model"), (*path, "fresh"), *[path] * bool(path)]


def edited(data: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    inner = data if isinstance(data, dict) else {}
    return {**inner, path[0]: edited(inner.get(path[0]), path[1:], value)}


def said(pipeline: Pipeline) -> list[tuple[str, str, str, str]]:
    return sorted((p.code, p.fact, p.fix, p.place.path) for p in pipeline.check())


@settings(deadline=None, max_examples=3000, derandomize=False)
@given(st.sampled_from(all_paths(DATA)), EDITS)
def test_set_is_editing_the_file(path: tuple[str, ...], text: str) -> None:
    value = load_text(text, Source("v", [text])).tree
    assert value is not None
    by_option = load(DEFAULT, [f"{'.'.join(path)}={text}"])
    for problem in by_option.check():
        if problem.place.file == "--set":
            assert problem.place.text == f"{'.'.join(path)}={text}"
    with tempfile.TemporaryDirectory() as folder:
        over = Path(folder) / "over.yaml"
        over.write_text(dump_yaml({"extends": str(DEFAULT), **edited({}, path, plain(value))}), encoding="utf-8")
        by_overlay = load(over)
        assert by_overlay.reading.document == by_option.reading.document
        assert said(by_overlay) == said(by_option)
        if path[-1] not in ("use", "type", "mode") and not isinstance(value.value, dict):
            over.write_text(dump_yaml(edited(DATA, path, plain(value))), encoding="utf-8")
            by_hand = load(over)
            assert by_hand.reading.resolved == by_option.reading.resolved
            assert said(by_hand) == said(by_option)
