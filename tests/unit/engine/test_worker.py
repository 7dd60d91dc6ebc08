"""A worker in this process: calls in, receipts and blocks out."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stub_nodes import stub

from flowrl.batch import Batch, Prompt, Sample, Token
from flowrl.engine.actor import RayWorker
from flowrl.engine.call import Call, NodeSetup, Receipt, WorkerSetup
from flowrl.engine.worker import Worker
from flowrl.evaluation import Asked
from flowrl.fields import FieldType
from flowrl.model import ModelSpec
from flowrl.nodes._backend.weights import Bucket, Update
from flowrl.registry import find
from flowrl.rows import Rows

MODELS = {"policy": ModelSpec(path="arith-tiny")}
UIDS = tuple(f"u{index}" for index in range(5))
PROMPTS = Rows(UIDS, planned=[2] * 5, settled=[0] * 5)


def prompts() -> Batch:
    return Batch(
        PROMPTS, {"prompt": Prompt(PROMPTS, [f"p{uid}" for uid in UIDS])}, {"prompt": FieldType("Prompt", "str")}
    )


def responses(rows: Rows | None = None) -> Batch:
    rows = rows or Rows.of(["b", "a", "a"])
    columns = {
        "response": Sample(rows, rows.names()),
        "response_mask": Token.of(rows, [[True, False]] * len(rows), "bool"),
    }
    return Batch(rows, columns, {"response": FieldType("Sample", "str"), "response_mask": FieldType("Token", "bool")})


def worker_of(*nodes: NodeSetup, strict_io: bool = False) -> Worker:
    worker = Worker(WorkerSetup("gpu", 1, 2, nodes, MODELS, seed=3, num_threads=1, strict_io=strict_io, can_kill=False))
    worker.load()
    return worker


def run(
    node: NodeSetup, *parts: Batch, call: Call | None = None, strict_io: bool = False
) -> list[tuple[Receipt, list[Batch]]]:
    call = call or Call(node.name, 1, parts[0].rows.uids if parts else ())
    return list(worker_of(node, strict_io=strict_io).blocks(call, parts))


def test_a_stream_without_blocks_is_sent_at_its_end() -> None:
    ((receipt, (whole,)),) = run(stub("r", "Rollout"), prompts())
    assert whole.rows.uids == UIDS
    assert len(whole.rows) == 10
    assert (receipt.settled, receipt.last, receipt.failed) == (UIDS, True, False)
    assert (receipt.worker, receipt.step, receipt.attempt) == ("gpu/1", 1, 1)
    assert receipt.fields == (("response_mask", "response"),)
    assert {part.name: part.value for part in receipt.metrics} == {"rollout/tokens": 20}
    assert receipt.bytes_in > 0
    assert receipt.bytes_out > 0


def test_a_stream_is_gathered_into_blocks_of_whole_groups() -> None:
    found = run(stub("r", "Rollout"), prompts(), call=Call("r", 1, UIDS, block_groups=2))
    sizes = [receipt.rows.num_groups for receipt, _ in found]
    assert sizes == [2, 2, 1]
    assert [receipt.last for receipt, _ in found] == [False, False, True]
    assert sum((receipt.settled for receipt, _ in found), ()) == UIDS
    assert [receipt.metrics[0].value for receipt, _ in found] == [8, 8, 4]
    assert found[0][0].bytes_in > 0
    assert [receipt.bytes_in for receipt, _ in found[1:]] == [0, 0], "the inputs of a call are counted once"


def test_a_stream_that_breaks_off_keeps_its_blocks_and_settles_the_rest_as_failed() -> None:
    found = run(stub("r", "Rollout", fail_at=3), prompts(), call=Call("r", 1, UIDS, block_groups=2))
    assert [receipt.failed for receipt, _ in found] == [False, True]
    assert [receipt.settled for receipt, _ in found] == [UIDS[:2], UIDS[2:]]
    (failure,) = found[-1][0].failures
    assert failure.error == "RuntimeError: the engine is gone"
    assert "stub_nodes.py" in failure.traceback


@pytest.mark.parametrize("on_error", ["drop", "fail", "retry"])
def test_a_lost_session_is_left_out_only_where_that_is_asked_for(on_error: str) -> None:
    found = run(
        stub("r", "Rollout", lost="u3_1_0", on_error=on_error), prompts(), call=Call("r", 1, UIDS, block_groups=2)
    )
    assert any(receipt.failed for receipt, _ in found) == (on_error != "drop")
    assert [failure.rows for receipt, _ in found for failure in receipt.failures] == [("u3_1_0",)]
    assert found[-1][0].settled == (("u4",) if on_error == "drop" else ("u2", "u3", "u4"))


def test_a_node_that_raises_gives_a_failed_receipt_and_no_exception() -> None:
    ((receipt, outputs),) = run(stub("j", "Judge", bad="a_0_0", on_error="fail"), responses())
    assert receipt.failed
    assert receipt.last
    assert receipt.failures[-1].error == "ZeroDivisionError: nothing to divide"
    assert outputs == []
    assert receipt.fields == ()
    assert receipt.settled == ("b", "a")


def test_missing_inputs_are_a_failure_too() -> None:
    for node in (stub("s", "Source"), stub("u", "Update", model="policy")):
        ((receipt, _),) = run(node, call=Call(node.name, 1, ("a",)))
        (field,) = node.reads
        assert receipt.failed
        assert (
            receipt.failures[-1].error
            == f"LookupError: {node.name} reads '{field}', of which nothing has arrived for these groups"
        )


def test_a_node_has_nothing_to_do_where_every_trajectory_was_dropped() -> None:
    empty = Rows(["a"], planned=[2], settled=[2])
    for parts in ([responses(empty)], [responses(Rows.of(["a"]))], []):
        ((receipt, outputs),) = run(stub("s", "Spread"), *parts, call=Call("s", 1, ("a",)))
        assert outputs == []
        assert (receipt.settled, receipt.failed, receipt.fields) == (("a",), False, ())


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("axis", "TypeError: w wrote 'score' as Token, not as Sample[float]"),
        ("number", "TypeError: w returned 1 outputs, its Out has 2"),
        ("text", "TypeError: w wrote 'score', which is no Sample[float]: float cannot hold 'x'"),
        ("fraction", "TypeError: w wrote 'counts', which is no Token[int]: int cannot hold 0.5"),
        ("two rows", "ValueError: w wrote 'counts' for other rows than its first output"),
    ],
)
def test_an_output_that_is_not_what_was_declared_is_named(how: str, message: str) -> None:
    ((receipt, _),) = run(stub("w", "Wrong", how=how), responses())
    assert receipt.failures[-1].error == message


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("fewer", "ValueError: w was given 3 rows and wrote 1"),
        ("strange", "ValueError: w wrote rows that it was not given, such as elsewhere_0_0"),
        ("", None),
    ],
)
def test_strict_io_checks_the_rows(how: str, message: str | None) -> None:
    ((receipt, _),) = run(stub("w", "Wrong", how=how), responses(), strict_io=True)
    assert [failure.error for failure in receipt.failures] == [message] * (message is not None)


def test_strict_io_checks_that_floats_are_finite() -> None:
    ((receipt, _),) = run(stub("n", "NotFinite", value=float("inf")), responses(), strict_io=True)
    assert receipt.failures[-1].error == "ValueError: n wrote a value that is not finite to 'weights_of_tokens'"
    ((receipt, _),) = run(stub("n", "NotFinite"), responses(), strict_io=True)
    assert not receipt.failed
    ((receipt, _),) = run(stub("n", "NotFinite", value=float("inf")), responses())
    assert not receipt.failed
    ((receipt, _),) = run(stub("w", "Wrong", how="infinite"), responses(), strict_io=True)
    assert receipt.failures[-1].error == "ValueError: w wrote a value that is not finite to 'score'"
    ((receipt, _),) = run(stub("w", "Wrong", how="null"), responses(), strict_io=True)
    assert not receipt.failed


def test_a_worker_gets_only_the_fields_and_groups_of_its_call_in_canonical_order() -> None:
    node = stub("w", "Wrong")
    ((receipt, (out,)),) = run(node, responses(Rows.of(["c", "b", "a", "b"])), call=Call("w", 1, ("b", "a")))
    assert out.rows.names() == ["a_0_0", "b_0_0", "b_1_0"]
    assert receipt.bytes_in > 0
    assert receipt.bytes_out > 0


def test_parts_of_several_writers_are_joined_by_identity() -> None:
    node = stub("s", "Spread")
    rows = Rows.of(["a", "a", "b"])
    values = Batch(rows, {"value": Sample(rows, np.array([1.0, 2.0, 3.0]))}, {"value": FieldType("Sample", "float")})
    ((_, (out,)),) = run(node, responses(), values)
    tokens: Any = out.columns["tokens"]
    assert {name: row.tolist() for name, row in zip(out.rows.names(), tokens.jagged, strict=True)} == {
        "a_0_0": [1.0, 1.0], "a_1_0": [2.0, 2.0], "b_0_0": [3.0, 3.0]
    }  # fmt: skip
    assert tokens.values.dtype == np.float32


def test_an_update_without_outputs_settles_its_groups() -> None:
    ((receipt, outputs),) = run(stub("u", "Update", model="policy"), responses())
    assert outputs == []
    assert (receipt.settled, receipt.failed) == (("b", "a"), False)
    assert {part.name: part.value for part in receipt.metrics} == {"actor/tokens": 3.0}


def test_a_sync_node_sends_and_receives() -> None:
    worker = worker_of(stub("s", "Sync", model="policy"))
    for part in worker.send("s", [worker.receiver("s")]):
        worker.receive("s", part, 1)


def test_ray_may_send_into_the_parts_of_a_sync_whatever_they_come_from() -> None:
    actor: Any = SimpleNamespace(worker=SimpleNamespace(send=lambda node, receivers: iter((1, 2))))
    parts: Any = RayWorker.send(actor, "sync", [])
    assert [next(parts), parts.send(True)] == [1, 2]


def test_a_metric_with_two_reductions_is_a_failure_of_its_node() -> None:
    ((receipt, _),) = run(stub("t", "TwoReductions"), responses())
    assert receipt.failed
    assert receipt.failures[-1].error == "ValueError: metric 'x' is reduced by mean in one place and sum in another"


def test_a_reward_goes_on_without_its_bad_row() -> None:
    node = stub("j", "Judge", bad="a_1_0", on_error="unscored")
    ((receipt, (out,)),) = run(node, responses())
    scores = dict(zip(out.rows.names(), out.columns["score"].values.tolist(), strict=True))
    assert np.isnan(scores.pop("a_1_0"))
    assert scores == {"a_0_0": 5.0, "b_0_0": 5.0}
    assert not receipt.failed
    assert [failure.rows for failure in receipt.failures] == [("a_1_0",)]
    assert {part.name: part.value for part in receipt.metrics} == {"judge/seen": 3}


def test_a_reward_may_drop_its_bad_row() -> None:
    node = stub("j", "Judge", bad="a_1_0", on_error="drop")
    ((receipt, (out,)),) = run(node, responses(), strict_io=True)
    assert out.rows.names() == ["a_0_0", "b_0_0"]
    assert not receipt.failed
    ((receipt, (out,)),) = run(node, responses(Rows.of(["a"], session=[1])))
    assert len(out.rows) == 0
    assert receipt.settled == ("a",)


def library(name: str, use: str, **settings: Any) -> NodeSetup:
    """A node of the library as a worker needs it."""
    ref = find(use, Path())
    made = ref.load()
    reads = {port: (port,) for port, each in made.input_ports.items() if not each.optional}
    writes = {port: port for port in made.output_ports}
    return NodeSetup(name, ref, settings, "policy", reads, writes, (tuple(writes),) * bool(writes), "fail", None)


def colocated(num_rollouts: int = 1) -> Worker:
    """Scripted engines, a reader of the training weights, and a sync, on one worker."""
    rollouts = [library(f"r{number}", "rollout.generate", engine="fake", max_tokens=3 + number)
                for number in range(num_rollouts)]  # fmt: skip
    return worker_of(*rollouts, stub("p", "Read", model="policy"), library("s", "sync.weights"))


def versions(worker: Worker, node: str = "r0") -> set[int]:
    ((receipt, outputs),) = worker.blocks(Call(node, 1, UIDS), (prompts(),))
    assert not receipt.failed, receipt.failures
    return set(outputs[0].columns["policy_version"].values.tolist())


def update(worker: Worker, version: int) -> None:
    worker.receive("s", Bucket({}, {}, begins=Update({})), version)
    worker.receive("s", Bucket({}, {}, ends=True), version)


def engine_of(worker: Worker) -> Any:
    (engine,) = worker.shared["engines", "policy"].values()
    return engine


def test_what_computes_with_training_weights_knows_its_cycle_and_a_validation_has_none() -> None:
    worker, ran = worker_of(stub("j", "Judge"), stub("p", "Read", model="policy")), []
    for node, step, asked in (("p", 3, None), ("j", 4, None), ("p", 5, Asked(1)), ("p", 6, None)):
        list(worker.blocks(Call(node, step, ("a", "b"), asked=asked), (responses(),)))
        ran.append(worker.context(worker.setup.nodes[1]).cycle)
    assert ran == [3, 3, None, 6]


def test_an_engine_sleeps_while_a_model_computes_on_its_worker_and_wakes_to_generate() -> None:
    worker = colocated(num_rollouts=2)
    assert versions(worker) == {0}
    list(worker.blocks(Call("p", 1, ("a", "b")), (responses(),)))
    assert engine_of(worker)._turns.stopped == {"asleep"}
    assert versions(worker, "r1") == {0}, "a skipped sync leaves the weights of the last one"
    assert versions(worker) == {0}


def test_models_that_train_sleep_while_an_engine_generates_and_none_is_up_with_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, said = colocated(), list[str]()

    def hear(name: str, word: str) -> None:
        monkeypatch.setattr(type(worker.nodes[name]), word, lambda _: said.append(f"{name} {word}"))

    for name in ("r0", "p", "s"):
        hear(name, "sleep")
        hear(name, "wake")
    for node, given in (("r0", prompts()), ("p", responses()), ("p", responses()), ("r0", prompts())):
        list(worker.blocks(Call(node, 1, given.rows.uids), (given,)))
    assert said == ["r0 sleep", "p wake", "p sleep", "r0 wake"]


def test_an_engine_that_was_synced_in_its_sleep_wakes_with_the_new_weights() -> None:
    worker = colocated()
    for version in (1, 2):
        list(worker.blocks(Call("p", 1, ("a", "b")), (responses(),)))
        update(worker, version)
        assert versions(worker) == {version}


def served(worker: Worker, call: Call) -> Future[list[tuple[Receipt, list[Any]]]]:
    """Run a call in a thread of its own."""
    found = Future[list[tuple[Receipt, list[Any]]]]()
    Thread(target=lambda: found.set_result(list(worker.blocks(call, (prompts(),)))), daemon=True).start()
    return found


def serving(on_error: str = "fail", **script: Any) -> Worker:
    rollout = library("r", "rollout.generate", engine="fake", max_tokens=9, script=script)
    return worker_of(
        replace(rollout, on_error=on_error), stub("p", "Read", model="policy"), library("s", "sync.weights")
    )


def test_a_call_waits_for_the_end_of_an_update() -> None:
    worker = serving()
    worker.receive("s", Bucket({}, {}, begins=Update({})), 1)
    call = served(worker, Call("r", 1, UIDS, serves=True))
    time.sleep(0.1)
    assert not call.done()
    worker.receive("s", Bucket({}, {}, ends=True), 1)
    ((receipt, _),) = call.result(20)
    assert receipt.oldest == dict.fromkeys(UIDS, 1)


def test_calls_that_serve_keep_their_own_outputs_metrics_and_failures() -> None:
    worker = serving("drop", texts=["12", None], seconds=[0.1, 0.15, 0.2])
    uids = [UIDS[:2], UIDS[2:], UIDS[1:2]]
    calls = [served(worker, Call("r", 1, some, block_groups=1, serves=True)) for some in uids]
    for call, some in zip(calls, uids, strict=True):
        found = call.result(20)
        assert sorted(uid for receipt, _ in found for uid in receipt.settled) == sorted(some)
        assert sorted(name for _, (whole, *_) in found for name in whole.rows.names()) == [f"{uid}_0_0" for uid in some]
        assert sum(part.total for r, _ in found for part in r.metrics if part.name == "rollout/tokens") == 3 * len(some)
        assert sorted(row for r, _ in found for failure in r.failures for row in failure.rows) == [
            f"{uid}_1_0" for uid in some
        ]


def test_a_pause_keeps_what_is_served_and_lets_what_trains_run() -> None:
    worker = serving(texts=["12345678"], tokens_per_second=15.0)
    call = served(worker, Call("r", 1, UIDS, serves=True))
    time.sleep(0.1)
    worker.pause()
    ((receipt, _),) = worker.blocks(Call("p", 1, ("a", "b")), (responses(),))
    assert not receipt.failed and engine_of(worker)._turns.stopped == {"asleep"}
    later = served(worker, Call("r", 2, UIDS, serves=True))
    update(worker, 7)
    time.sleep(0.6)
    assert not call.done() and not later.done()
    worker.resume()
    ((receipt, (whole, *_)),) = call.result(20)
    assert receipt.oldest == dict.fromkeys(UIDS, 0)
    assert set(whole.columns["policy_version"].values.tolist()) == {0, 7}
    ((receipt, _),) = later.result(20)
    assert receipt.oldest == dict.fromkeys(UIDS, 7)


def test_aborted_groups_settle_without_rows_and_are_no_failures() -> None:
    worker = serving(stall=1.0)
    call = served(worker, Call("r", 1, UIDS, serves=True))
    time.sleep(0.1)
    worker.abort("r", UIDS)
    ((receipt, _),) = call.result(20)
    assert (receipt.settled, len(receipt.rows), receipt.failures, receipt.oldest) == (UIDS, 0, (), {})
