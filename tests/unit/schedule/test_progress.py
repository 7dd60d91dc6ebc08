"""What may run next within a step."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from stub_nodes import document

from flowrl import Pipeline
from flowrl.graph.build import Graph
from flowrl.schedule.base import Progress, Task

ON = {"model": "policy", "pool": "gpu"}
NODES: dict[str, Any] = {
    "rollout": {"use": "Rollout", **ON},
    "judge": {"use": "Judge"},
    "spread": {"use": "Spread", "reads": {"value": "score"}},
    "old": {"use": "Read", **ON},
    "update": {"use": "Update", **ON},
    "sync": {"use": "Sync", "model": "policy"},
}
UIDS = ("a", "b", "c")


def graph_of(nodes: dict[str, Any]) -> Graph:
    made = document(nodes, models={"policy": {"path": "x", "trainable": True}}, pools={"gpu": {}})
    return Pipeline(made).plan().graph


GRAPH = graph_of(NODES)


def ready(progress: Progress) -> dict[str, tuple[str, ...]]:
    return {task.node: task.uids for task in progress.ready()}


def finish(progress: Progress, *names: str) -> None:
    for name in names:
        progress.submit(name, UIDS)
        progress.settle(name, UIDS)


def test_only_what_reads_the_data_can_start() -> None:
    assert list(Progress(GRAPH, 3, UIDS).ready()) == [Task("rollout", 3, UIDS)]


def test_nodes_of_single_samples_start_on_the_groups_that_have_settled() -> None:
    progress = Progress(GRAPH, 1, UIDS)
    progress.submit("rollout", UIDS)
    progress.settle("rollout", ["b"])
    assert ready(progress) == {"judge": ("b",), "old": ("b",)}
    progress.submit("judge", ["b"])
    progress.settle("rollout", ["c", "a"])
    assert ready(progress) == {"judge": ("a", "c"), "old": ("a", "b", "c")}


def test_a_batch_node_waits_until_its_writers_are_done() -> None:
    progress = Progress(GRAPH, 1, UIDS)
    finish(progress, "rollout")
    progress.submit("judge", UIDS)
    progress.settle("judge", ["a", "b"])
    assert "spread" not in ready(progress)
    progress.settle("judge", ["c"])
    assert ready(progress)["spread"] == UIDS


def test_weight_edges_wait_for_the_whole_predecessor() -> None:
    progress = Progress(GRAPH, 1, UIDS)
    finish(progress, "rollout", "judge", "spread")
    progress.submit("old", UIDS)
    progress.settle("old", ["a", "b"])
    assert ready(progress) == {}
    progress.settle("old", ["c"])
    assert ready(progress) == {"update": UIDS}
    finish(progress, "update")
    assert ready(progress) == {"sync": UIDS}
    assert not progress.complete
    finish(progress, "sync")
    assert progress.complete


def test_nodes_of_the_front_are_walked_there_and_waited_for_here() -> None:
    front = Progress(GRAPH.restricted(["rollout", "judge"]), 1)
    front.admit(("a", "b", "c", "d"))
    batch = Progress(GRAPH, 1, ("b", "c"), front=front)
    assert ready(batch) == {} and "rollout" not in batch
    front.submit("rollout", ("a", "b", "c", "d"))
    front.settle("rollout", ["b", "c"])
    assert ready(front) == {"judge": ("b", "c")} and ready(batch) == {"old": ("b", "c")}
    assert batch.is_done("rollout") and not front.is_done("rollout")
    front.forget(["b", "c"])
    assert front.uids == ("a", "d") and ready(front) == {}
    front.settle("rollout", ["b"])
    assert front.settled("rollout") == set(), "what is said of groups that have left does not matter"


def test_canonical_blocks_of_an_open_flow_are_cut_at_each_admission() -> None:
    progress = Progress(GRAPH, 1, canonical={"judge": 2})
    progress.admit(("a", "b", "c"))
    progress.admit(("d", "e"))
    progress.submit("rollout", progress.uids)
    progress.settle("rollout", progress.uids)
    blocks = [task.uids for task in progress.ready() if task.node == "judge"]
    assert blocks == [("a", "b"), ("c",), ("d", "e")]
    progress.forget(["d"])
    assert [task.uids for task in progress.ready() if task.node == "judge"] == [("a", "b"), ("c",), ("e",)]


def test_the_edge_to_the_next_step_holds_nothing_back_in_this_one() -> None:
    assert "rollout" in ready(Progress(GRAPH, 1, UIDS))


def test_a_field_is_released_after_its_last_reader() -> None:
    progress = Progress(GRAPH, 1, UIDS)
    assert progress.released() == ["answer", "data_source"], "columns of the data that nobody reads"
    finish(progress, "rollout")
    assert progress.released() == ["prompt", "answer", "data_source"]
    finish(progress, "judge")
    assert "response" in progress.released()
    assert "response_mask" not in progress.released()
    finish(progress, "old", "spread", "update")
    assert {"response_mask", "log_probs", "score"} <= set(progress.released())


def test_who_is_late_is_told_with_the_number_of_groups() -> None:
    progress = Progress(GRAPH, 1, UIDS)
    progress.submit("rollout", UIDS)
    progress.settle("rollout", ["a"])
    progress.submit("judge", ["a"])
    assert progress.waiting() == {"rollout": 2, "judge": 1}


@given(st.integers(1, 5), st.sets(st.sampled_from(["judge", "spread", "old"])), st.data())
def test_however_groups_settle_each_node_gets_each_group_once_and_the_step_ends(
    num_groups: int, left_out: set[str], data: st.DataObject
) -> None:
    nodes = {
        name: node
        for name, node in NODES.items()
        if name not in left_out | ({"spread"} if "judge" in left_out else set())
    }
    graph = graph_of(nodes)
    progress = Progress(graph, 1, [f"u{index}" for index in range(num_groups)])
    running: list[tuple[str, str]] = []
    given_to: dict[str, list[str]] = {name: [] for name in nodes}
    settled: dict[str, set[str]] = {name: set() for name in nodes}
    while not progress.complete:
        for task in list(progress.ready()):
            if not data.draw(st.booleans()) and running:
                continue  # its worker is busy; it stays ready
            for edge in graph.edges:
                if edge.target == task.node and edge.source != "data" and not edge.distance:
                    assert settled[edge.source] >= set(task.uids)
                    if edge.kind == "weights" or graph.nodes[task.node].cls.scope == "batch":
                        assert settled[edge.source] == set(progress.uids)
            progress.submit(task.node, task.uids)
            given_to[task.node] += task.uids
            running += [(task.node, uid) for uid in task.uids]
        assert running, "nothing runs and the step has not ended"
        node, uid = running.pop(data.draw(st.integers(0, len(running) - 1)))
        progress.settle(node, [uid])
        settled[node].add(uid)
    assert all(sorted(uids) == sorted(progress.uids) for uids in given_to.values())
    assert set(progress.released()) == set(graph.fields)
    assert not progress.waiting()


def test_readers_of_weights_work_on_the_same_blocks_whatever_the_order_of_arrival() -> None:
    progress = Progress(GRAPH, 1, UIDS, {"old": 2})
    progress.submit("rollout", UIDS)
    progress.settle("rollout", ["c", "a"])
    assert [task.uids for task in progress.ready() if task.node == "old"] == [("c",)], "the block of a waits for b"
    progress.submit("old", ["c"])
    progress.settle("rollout", ["b"])
    assert [task.uids for task in progress.ready() if task.node == "old"] == [("a", "b")]


def test_a_reader_on_workers_that_generate_or_train_takes_everything_at_once_under_every_schedule() -> None:
    models = {"policy": {"path": "x", "trainable": True}, "reference": {"path": "x"}}
    nodes = {**NODES, "ref": {"use": "Read", "model": "reference", "pool": "own", "writes": {"log_probs": "ref"}}}
    for pool in ("gpu", "train"):
        nodes |= {name: {**nodes[name], "pool": pool} for name in ("old", "update")}
        pools: dict[str, Any] = {"gpu": {}, "train": {}, "own": {}}
        plan = Pipeline(document(nodes, models=models, pools=pools, batch={"prompts": 32, "group": 2})).plan()
        assert plan.canonical_groups == {"old": 32, "ref": 4}
