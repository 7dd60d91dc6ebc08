"""Groups that flow through the loop: gates, lost and late groups, and going on from a checkpoint."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import PrivateAttr

import flowrl
from flowrl import Gate, Node, Prompt, Sample, Token
from flowrl.data.stream import PromptStream
from flowrl.engine.call import Receipt
from flowrl.engine.dispatch import Arrival, Late
from flowrl.engine.front import Front
from flowrl.engine.loop import Loop
from flowrl.engine.store import Store
from flowrl.engine.validation import validate
from flowrl.errors import RunError
from flowrl.nodes.rollout.generate import Generate
from flowrl.rows import Rows
from flowrl.schedule.base import Progress
from flowrl.schedule.policy import schedule_of

STUBS = Path(__file__).parents[2] / "stub_nodes.py"
ASYNC = {"mode": "separate_async", "max_staleness": 1}
COLOCATED = {"mode": "colocate_async", "max_staleness": 1}
SCHEDULES = [{"mode": "sync"}, COLOCATED, ASYNC]


class Sieve(Gate):
    """Keeps the groups whose name falls below a share."""

    share: float = 0.5

    class Out(NamedTuple):
        keep: Prompt[bool]

    def run(self, response: Sample[str]) -> Out:
        kept = [zlib.crc32(uid.encode()) % 100 < 100 * self.share for uid in response.rows.uids]
        return self.Out(Prompt(response.rows, np.array(kept)))


class Seldom(Node):
    """An update that changes weights in some of its calls alone."""

    scope = "batch"
    weights = "updates"
    pure = False
    device = "accelerator"

    changes: list[bool]

    _calls: int = PrivateAttr(0)

    def run(self, response_mask: Token[bool]) -> None:
        self._calls += 1

    def changed(self) -> bool:
        return self.changes[(self._calls - 1) % len(self.changes)]


def document(schedule: dict[str, Any], folder: Path, **nodes: Any) -> dict[str, Any]:
    own = {"workers": 1} if schedule["mode"] != "colocate_async" else {"shares": "train"}
    return {
        "flowrl": 1,
        "name": "flows",
        "models": {"policy": {"path": "arith-tiny", "trainable": True}},
        "data": {"train": {"type": "arithmetic", "size": 512}},
        "batch": {"prompts": 4, "group": 2},
        "pools": {"train": {"workers": 1}, "generate": own},
        "schedule": schedule,
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 3,
                "script": {"texts": ["1", "23"], **nodes.pop("script", {})},
            },
            "update": {"use": f"{STUBS}:Update", "model": "policy", "pool": "train"},
            "sync": {"use": f"{STUBS}:Sync", "model": "policy"},
            **nodes,
        },
        "run": {"steps": 4, "dir": str(folder)},
        "tracking": [],
    }  # fmt: skip


def run(made: dict[str, Any], **more: Any) -> flowrl.Result:
    return flowrl.Pipeline(made).run(local=True, quiet=True, **more)


def events(result: flowrl.Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]


def trained(result: flowrl.Result) -> list[list[str]]:
    """The groups of each batch."""
    # An update writes no rows; the reader before it has those of the batch.
    return [sorted({row.split("_")[0] for row in event["rows"]}) for event in events(result) if event["node"] == "old"]


def idle_front(schedule: dict[str, Any], folder: Path, **nodes: Any) -> Front:
    """The front of a run in which nothing is generated."""
    plan = flowrl.Pipeline(document(schedule, folder, **nodes)).plan()
    cluster = SimpleNamespace(put=lambda batch: batch)
    sampler = SimpleNamespace(begin=lambda step, batch: None, leave=lambda uids: None)
    dispatcher: Any = SimpleNamespace(cluster=cluster, store=Store(), sampler=sampler)
    return Front(plan, schedule_of(plan), PromptStream(plan.document.data["train"].load(), 0), dispatcher)


def made_by_rollout() -> list[str]:
    """Fields that `rollout.generate` writes."""
    return list(Generate.output_ports)


def gated(**settings: Any) -> dict[str, Any]:
    return {
        "sieve": {"use": f"{Path(__file__)}:Sieve", "gate": "keep", **settings},
        "old": {"use": f"{STUBS}:Read", "model": "policy", "pool": "train"},
    }


def passes(uid: str, share: float = 0.5) -> bool:
    return zlib.crc32(uid.encode()) % 100 < 100 * share


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
def test_behind_a_gate_every_batch_is_full_of_groups_that_it_keeps(schedule: dict[str, Any], tmp_path: Path) -> None:
    result = run(document(schedule, tmp_path, **gated()))
    batches = trained(result)
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    uids = [uid for batch in batches for uid in batch]
    assert len(set(uids)) == len(uids) and all(map(passes, uids))
    lost = {name.rsplit("/", 1)[-1]: sum(step[name] for step in result.metrics) for name in result.metrics[0]
            if "given_up" in name}  # fmt: skip
    assert lost["filtered"] > 0
    assert (lost["surplus"] > 0) <= (schedule["mode"] == "sync"), "others keep what is beyond a batch"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
def test_a_gate_that_keeps_nothing_ends_the_run_by_name(schedule: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"step 1: only 0 of 4 groups were kept of \d+ tried .*node sieve"):
        run(document(schedule, tmp_path, **gated(share=0.0, max_rounds=3)))


@pytest.mark.parametrize("when_short", ["short", "skip"])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
def test_or_the_batch_is_short_or_the_step_trains_nothing(
    schedule: dict[str, Any], when_short: str, tmp_path: Path
) -> None:
    result = run(document(schedule, tmp_path, **gated(share=0.2, max_rounds=1, when_short=when_short)))
    assert len(result.metrics) == 4
    sizes = [len(batch) for batch in trained(result)]
    assert all(size < 5 for size in sizes)
    assert when_short == "short" or set(sizes) <= {4}


@pytest.mark.parametrize("when_short", ["short", "skip"])
def test_what_was_updated_is_synced_where_the_gate_leaves_nothing_for_the_last_batch(
    when_short: str, tmp_path: Path
) -> None:
    schedule = {**ASYNC, "warmup_batches": 0, "updates_per_sync": 2}
    settings = gated(share=0.35, max_rounds=1, when_short=when_short)
    result = run(document(schedule, tmp_path, **settings) | {"run": {"steps": 10, "dir": str(tmp_path)}})
    steps = {node: [event["step"] for event in events(result) if event["node"] == node] for node in ("update", "sync")}
    assert steps["sync"] == sorted(set(steps["update"]))
    assert len(steps["update"]) < 2 * len(steps["sync"]), "some steps train one batch only"


def test_what_surplus_groups_report_is_of_the_step_that_made_them(tmp_path: Path) -> None:
    result = run(document({"mode": "sync"}, tmp_path, **gated()))
    assert sum(step["rollout/given_up/surplus"] for step in result.metrics) > 0
    assert {step["staleness/max"] for step in result.metrics} == {0}


@pytest.mark.parametrize("schedule", [COLOCATED, ASYNC], ids=lambda schedule: schedule["mode"])
def test_a_group_without_trajectories_is_replaced_and_counted(schedule: dict[str, Any], tmp_path: Path) -> None:
    old = {"use": f"{STUBS}:Read", "model": "policy", "pool": "train"}
    result = run(document(schedule, tmp_path, old=old, script={"fail": 0.4}))
    assert [len(batch) for batch in trained(result)] == [4, 4, 4, 4]
    assert sum(step["rollout/given_up/failed"] for step in result.metrics) > 0


def test_of_two_rollouts_either_may_leave_a_group_without_trajectories(tmp_path: Path) -> None:
    rollout = document(ASYNC, tmp_path)["nodes"]["rollout"]
    front = idle_front(ASYNC, tmp_path, greedy={**rollout, "use": "rollout.greedy"})
    front.begin(1)
    front.admit(0)
    kept, lost = uids = front.progress.uids[:2]
    for node, rows in (("greedy", Rows(uids)), ("rollout", Rows(uids, [0], [0]))):
        front.progress.submit(node, uids)
        receipt = Receipt(node, 1, 1, "generate/0", rows, uids, 0.0, 0.0, 0, 0)
        front.collect(Arrival(node, receipt, (), front.progress))
    assert kept in front.flow.groups, "whichever ends first"
    assert lost not in front.flow.groups
    assert front.flow.given_up == {"failed": 1}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
def test_when_every_session_fails_the_run_ends_instead_of_trying_for_ever(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    made = document(schedule, tmp_path)
    made["nodes"]["rollout"]["script"] = {"texts": [None]}
    with pytest.raises(RunError, match="every row of step 1 failed"):
        run(made)


def test_an_engine_that_stays_behind_its_syncs_ends_the_run_by_name(tmp_path: Path) -> None:
    made = document(ASYNC, tmp_path)
    made["nodes"]["sync"]["tells"] = False
    with pytest.raises(RunError, match=r"made with version 0 of the weights, after the sync of 1 .*node rollout"):
        run(made)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_of_two_models_each_may_be_synced_when_the_other_is_not(schedule: dict[str, Any], tmp_path: Path) -> None:
    made = document(schedule, tmp_path)
    made["models"]["second"], made["run"]["steps"] = made["models"]["policy"], 9
    seldom = {"use": f"{Path(__file__)}:Seldom", "pool": "train"}
    other = {"response": "text", "response_mask": "mask"}
    skipped = {name: f"{name}_2" for name in made_by_rollout() if name not in other}
    made["nodes"] |= {
        "update": {**seldom, "model": "policy", "changes": [True, True, False]},
        "rollout_2": {**made["nodes"]["rollout"], "model": "second", "writes": {**other, **skipped}},
        "update_2": {**seldom, "model": "second", "changes": [False, True], "reads": {"response_mask": "mask"}},
        "sync_2": {"use": f"{STUBS}:Sync", "model": "second"},
    }
    found = run(made)
    assert len(found.metrics) == 9
    made_with = [event["version"] for event in events(found) if event["node"] == "sync_2"]
    assert made_with == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    bound = schedule.get("max_staleness", 0)
    assert max(step["staleness/max"] for step in found.metrics) <= bound, "behind their own model"


@pytest.mark.parametrize("schedule", [{**ASYNC, "max_staleness": 0}, ASYNC])
def test_a_validation_between_two_steps_changes_neither_ages_nor_admissions(
    schedule: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    admitted: list[tuple[int, str]] = []
    aheads: list[int] = []
    put = Front.put_in_flight

    def noted(front: Front, prompts: Any, version: int) -> Any:
        admitted.extend((front.progress.step, prompt.uid) for prompt in prompts)
        return put(front, prompts, version)

    async def validated(loop: Loop, step: int) -> dict[str, float]:
        aheads.append(loop.ahead_of("policy"))
        return await validate(loop, step)

    monkeypatch.setattr(Front, "put_in_flight", noted)
    monkeypatch.setattr("flowrl.engine.loop.validate", validated)
    reward = {"use": "reward.exact_match"}
    accuracy = {"use": "evaluate.accuracy", "dataset": "val", "every": 1, "samples": 2, "temperature": 0}
    found = []
    for nodes in ({}, {"accuracy": accuracy}):
        made = document(schedule, tmp_path, **gated(), reward=reward, **nodes)
        made["data"]["val"] = {"type": "arithmetic", "size": 5, "seed": 1}
        run(made)
        found.append(admitted[:])
        admitted.clear()
    assert found[0] == found[1]
    assert set(aheads) == {0}, "what arrives meanwhile is no newer than it says"


def test_sessions_that_fail_during_a_validation_are_counted_in_the_next_step(tmp_path: Path) -> None:
    accuracy = {"use": "evaluate.accuracy", "dataset": "val", "every": 1, "samples": 2, "temperature": 0}
    made = document(COLOCATED, tmp_path, reward={"use": "reward.exact_match"}, accuracy=accuracy, script={"fail": 0.3})
    made["data"]["val"] = {"type": "arithmetic", "size": 20, "seed": 1}
    result = run(made)
    found = events(result)
    last = max(place for place, event in enumerate(found) if event["node"] == "sync")
    lost = [row for event in found[:last] for failure in event["failures"] for row in failure["rows"]]
    lost = [row for row in lost if not row.startswith("val:")]
    assert len(lost) == sum(step["rows/failed"] for step in result.metrics if "rows/failed" in step) > 4


@pytest.mark.parametrize("schedule", [COLOCATED, {**ASYNC, "updates_per_sync": 2}, {**ASYNC, "max_staleness": 2}])
def test_a_run_that_goes_on_trains_the_same_prompts_each_once_and_no_older(
    schedule: dict[str, Any], tmp_path: Path
) -> None:
    old = {"use": f"{STUBS}:Read", "model": "policy", "pool": "train"}
    made = document(schedule, tmp_path, old=old, script={"seconds": [0.0, 0.02, 0.01]}) | {"checkpoint": {"every": 1}}
    whole = run({**made, "name": "whole", "run": {**made["run"], "steps": 6}})
    first = run({**made, "name": "part", "run": {**made["run"], "steps": 3}})
    rest = run({**made, "name": "part", "run": {**made["run"], "steps": 6}}, resume=str(first.folder))
    once = [uid for batch in trained(whole) for uid in batch]
    twice = [uid for batch in trained(rest) for uid in batch]
    assert len(twice) == len(set(twice)) == 24
    assert sorted(once) == sorted(twice)
    assert [step["rollout/in_flight"] for step in rest.metrics] == [4.0] * 6 or schedule["max_staleness"] == 2


@pytest.mark.parametrize("stale", ["drop", "wait"])
@pytest.mark.parametrize(
    ("then", "prompts"),
    [({"mode": "sync"}, 4), ({**ASYNC, "max_staleness": 0}, 4), (COLOCATED, 4), ({**ASYNC, "warmup_batches": 3}, 2)],
)
def test_a_run_that_goes_on_under_another_schedule_keeps_to_its_bounds(
    then: dict[str, Any], prompts: int, stale: str, tmp_path: Path
) -> None:
    first_schedule = {"mode": "separate_async", "max_staleness": 3, "warmup_batches": 3, "stale": stale}
    old = {"use": f"{STUBS}:Read", "model": "policy", "pool": "train"}
    first = run(document(first_schedule, tmp_path, old=old) | {"checkpoint": {"every": 1}})
    then = then if not then.get("max_staleness") else {**then, "stale": stale}
    made = document(then, tmp_path, old=old) | {"batch": {"prompts": prompts, "group": 2}}
    made["run"]["steps"] = 9
    rest = run(made, resume=str(first.folder))
    batches, steps = trained(rest)[4:], rest.metrics[4:]
    assert [len(batch) for batch in batches] == [prompts] * 5
    uids = [uid for batch in trained(rest) for uid in batch]
    assert len(set(uids)) == len(uids)
    bound = then.get("max_staleness", 0)
    assert max(step["staleness/max"] for step in steps) <= bound
    assert max(step.get("rollout/in_flight", 0) for step in steps) <= prompts * bound


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule["mode"])
def test_only_what_is_still_generated_is_late(schedule: dict[str, Any], tmp_path: Path) -> None:
    rollout = document(schedule, tmp_path)["nodes"]["rollout"]
    front = idle_front(schedule, tmp_path, rollout={**rollout, "timeout": 1})
    plan, node = front.plan, front.plan.graph.nodes["rollout"]
    front.begin(1)
    front.admit(0)
    ended, slow, *_ = uids = front.progress.uids
    front.progress.submit("rollout", uids[:2])
    front.progress.settle("rollout", [ended])
    replaces = schedule["mode"] != "sync"
    fate = "are replaced" if replaces else "end with what they have"
    assert front.late(Late(node, "generate/0", uids[:2], front.progress)) == f"{slow} {fate}"
    assert (slow in front.flow.groups, ended in front.flow.groups) == (not replaces, True)
    validation = Progress(plan.graph, 1, ["val:u1"])
    validation.submit("rollout", ["val:u1"])
    told = front.late(Late(node, "generate/0", ("val:u1",), validation))
    assert told == "val:u1 end with what they have"
    assert front.late(Late(node, "generate/0", (ended,), front.progress)) == ""
    assert [front.end()["rollout/late"] for _ in range(2)] == [1, 0], "counted in its step, validation left out"


def test_a_group_of_a_run_that_goes_on_is_given_up_under_its_length(tmp_path: Path) -> None:
    before, after = idle_front(ASYNC, tmp_path), idle_front(ASYNC, tmp_path)
    before.admit(0)
    group = next(iter(before.flow.groups.values()))
    before.flow.settle(group.uid, 0)
    group.longest = 3
    state = before.state()
    after.prompts.load_state(state)
    after.restore(state, ((), ()), 1)
    after.give_up(group.uid, "stale")
    assert after.lengths == {"up_to_4": 1}
