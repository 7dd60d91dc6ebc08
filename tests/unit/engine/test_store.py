"""Which objects hold which fields, and when they go."""

from __future__ import annotations

import pytest

from flowrl.engine.store import Store
from flowrl.rows import Rows


@pytest.fixture
def store() -> Store:
    """Two blocks of two fields that travel together, and one of another."""
    store = Store()
    store.add("one", ["x", "y"], Rows.of(["a", "b"]))
    store.add("two", ["x", "y"], Rows.of(["c"]))
    store.add("three", ["z"], Rows.of(["a", "b", "c"]))
    return store


def refs(store: Store, fields: list[str], uids: list[str]) -> list[str]:
    return [part.ref for part in store.find(fields, uids)]


def test_only_objects_with_an_asked_field_of_an_asked_group_are_found(store: Store) -> None:
    assert refs(store, ["x"], ["a", "b", "c"]) == ["one", "two"]
    assert refs(store, ["y", "z"], ["c"]) == ["two", "three"]
    assert refs(store, ["z"], ["d"]) == []
    assert refs(store, ["w"], ["a"]) == []


def test_an_object_goes_when_all_that_it_holds_is_released(store: Store) -> None:
    store.release(["x"], ["a", "b", "c"])
    assert refs(store, ["y"], ["a"]) == ["one"]
    store.release(["y"], ["a", "c"])
    assert refs(store, ["x", "y"], ["a", "b", "c"]) == ["one"], "b is not done with y"
    store.release(["y"], ["b"])
    assert refs(store, ["x", "y"], ["a", "b", "c"]) == []
    assert refs(store, ["z"], ["a"]) == ["three"]


def test_groups_that_are_forgotten_take_their_objects_with_them(store: Store) -> None:
    store.forget(["a", "c"])
    assert refs(store, ["x", "y", "z"], ["a", "b", "c"]) == ["one", "three"], "b is still there"
    store.forget(["b"])
    assert refs(store, ["x", "y", "z"], ["a", "b", "c"]) == []
    store.add("new", ["x"], Rows.of(["a"]))
    store.release(["y"], ["a"])
    assert refs(store, ["x"], ["a"]) == ["new"], "nothing is remembered of an earlier group of this name"


def test_groups_without_trajectories_are_found_too() -> None:
    store = Store()
    store.add("prompts", ["prompt"], Rows(["a", "b"]))
    assert refs(store, ["prompt"], ["b"]) == ["prompts"]
