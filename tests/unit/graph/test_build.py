"""Edges: those of fields, and those that keep a model's weights in order."""

from __future__ import annotations

from typing import Any

import pytest
from stub_nodes import document

from flowrl import Pipeline
from flowrl.graph.build import DATA, Edge, Graph

MODELS = {"policy": {"path": "x", "trainable": True}, "frozen": {"path": "x"}}
POOLS = {"gpu": {}}
ON = {"model": "policy", "pool": "gpu"}
TRAINED = {
    "rollout": {"use": "Rollout", **ON},
    "old": {"use": "Read", **ON},
    "update": {"use": "Update", **ON},
    "sync": {"use": "Sync", "model": "policy"},
}


def graph(nodes: dict[str, Any], **sections: Any) -> Graph:
    return Pipeline(document(nodes, **{"models": {"policy": MODELS["policy"]}, "pools": POOLS} | sections)).plan().graph


def test_a_field_runs_from_its_writer_to_its_readers() -> None:
    found = graph(
        {"a": {"use": "Source"}, "b": {"use": "Mix", "reads": {"inputs": ["value"]}, "writes": {"value": "v2"}}}
    )
    assert Edge("a", "b", "field", "value") in found.edges
    assert Edge(DATA, "a", "field", "prompt") in found.edges
    assert found.fields["value"].writer == "a"
    assert found.fields["value"].readers == ("b",)
    assert found.fields["prompt"].writer == DATA
    assert found.levels == (("a",), ("b",))


def test_weights_are_read_then_updated_then_synced_then_used_by_the_next_step() -> None:
    found = graph(TRAINED)
    assert {edge for edge in found.edges if edge.kind == "weights"} == {
        Edge("old", "update", "weights", "policy"),
        Edge("update", "sync", "weights", "policy"),
        Edge("sync", "rollout", "weights", "policy", distance=1),
    }
    assert found.levels == (("rollout",), ("old",), ("update",), ("sync",))
    assert sorted(found.sources["update"]) == ["old", "rollout"]
    assert sorted(found.sources["rollout"]) == [DATA]


def test_readers_of_another_model_do_not_wait_for_the_update() -> None:
    ref = {"use": "Read", "model": "frozen", "pool": "gpu", "writes": {"log_probs": "ref"}}
    use_ref = {"use": "Spread", "reads": {"response_mask": "response_mask", "value": "value"}}
    found = graph({**TRAINED, "ref": ref, "source": {"use": "Source"}, "spread": use_ref}, models=MODELS)
    assert not any(edge.source == "ref" and edge.kind == "weights" for edge in found.edges)


def test_an_optional_port_is_bound_only_if_its_field_is_written() -> None:
    nodes = {"a": {"use": "Source"}, "b": {"use": "Optional", "writes": {"value": "v2"}}}
    assert graph(nodes).nodes["b"].reads == {"value": ("value",)}
    extra = {"use": "Source", "writes": {"value": "extra"}}
    assert graph({**nodes, "c": extra}).nodes["b"].reads == {"value": ("value",), "extra": ("extra",)}
    own = {"use": "Optional", "writes": {"value": "extra"}}
    assert graph({**nodes, "b": own}).nodes["b"].reads == {"value": ("value",)}
    renamed = {"use": "Optional", "reads": {"extra": "value"}, "writes": {"value": "v2"}}
    assert graph({**nodes, "b": renamed}).nodes["b"].reads == {"value": ("value",), "extra": ("value",)}


def test_a_list_port_takes_several_fields_and_one() -> None:
    sources = {name: {"use": "Source", "writes": {"value": name}} for name in ("x", "y")}
    mixed = {"use": "Mix", "reads": {"inputs": ["x", "y"]}}
    assert graph({**sources, "m": mixed}).nodes["m"].reads == {"inputs": ("x", "y")}
    one = {"use": "Mix", "reads": {"inputs": "x"}}
    assert graph({**sources, "m": one}).nodes["m"].reads == {"inputs": ("x",)}


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_the_order_of_declaration_changes_nothing(turn: int) -> None:
    names = list(TRAINED)
    turned = graph({name: TRAINED[name] for name in [*names[turn:], *names[:turn]]})
    assert turned.edges == graph(TRAINED).edges
    assert turned.order == graph(TRAINED).order


def test_fields_with_the_same_readers_travel_together_and_unread_ones_not_at_all() -> None:
    plan = Pipeline(
        document({**TRAINED, "judge": {"use": "Judge"}}, models={"policy": MODELS["policy"]}, pools=POOLS)
    ).plan()
    assert plan.outputs["rollout"] == (("response_mask",), ("response",))
    assert plan.outputs["judge"] == ()
    assert plan.pool_of(plan.graph.nodes["sync"]) == "gpu"
    assert plan.engine_pools("policy") == ["gpu"]
