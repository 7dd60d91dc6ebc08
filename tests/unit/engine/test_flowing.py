"""Groups that flow through the loop: gates, lost and late groups, and going on from a checkpoint."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import flowrl
from flowrl import Gate, Prompt, Sample
from flowrl.errors import RunError

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


def trained(result: flowrl.Result) -> list[list[str]]:
    """The groups of each batch."""
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    # An update writes no rows; the reader before it has those of the batch.
    return [sorted({row.split("_")[0] for row in event["rows"]}) for event in events if event["node"] == "old"]


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


@pytest.mark.parametrize("schedule", [COLOCATED, ASYNC], ids=lambda schedule: schedule["mode"])
def test_a_group_without_trajectories_is_replaced_and_counted(schedule: dict[str, Any], tmp_path: Path) -> None:
    old = {"use": f"{STUBS}:Read", "model": "policy", "pool": "train"}
    result = run(document(schedule, tmp_path, old=old, script={"fail": 0.4}))
    assert [len(batch) for batch in trained(result)] == [4, 4, 4, 4]
    assert sum(step["rollout/given_up/failed"] for step in result.metrics) > 0


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
