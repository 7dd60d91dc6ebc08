"""What each schedule admits, cuts and gives up."""

from __future__ import annotations

from typing import Any

import pytest

from flowrl.schedule.colocate_async import ColocateAsync
from flowrl.schedule.flow import Flow
from flowrl.schedule.separate_async import SeparateAsync
from flowrl.schedule.sync import Sync


def flow_of(num: int, version: int = 0, settled: Any = ()) -> Flow:
    flow = Flow()
    flow.admit([f"u{number}" for number in range(num)], version)
    for number in settled:
        flow.settle(f"u{number}", version)
    return flow


def test_sync_admits_a_whole_batch_when_nothing_is_in_flight_and_cuts_it_at_once() -> None:
    assert Sync(8).num_to_admit(Flow()) == 8
    flow = flow_of(8)
    assert Sync(8).num_to_admit(flow) == 0
    assert Sync(8).cut(flow, 3) == [f"u{number}" for number in range(8)]


def test_sync_behind_a_gate_waits_for_the_round_and_admits_by_the_share_that_was_kept() -> None:
    schedule, flow = Sync(8, gated=True), flow_of(8, settled=range(7))
    assert schedule.num_to_admit(flow) == 0, "one still runs"
    for number in (0, 1, 2, 3, 4):
        flow.give_up(f"u{number}", "filtered")
    flow.settle("u7", 0)
    assert schedule.cut(flow, 0) is None
    assert schedule.num_to_admit(flow) == 8, "5 are missing, 3 of 8 were kept: 14 would be needed, 8 at most"
    flow.give_up("u5", "filtered")
    flow.admit(["u8", "u9", "u10", "u11", "u12", "u13"], 0)
    for number in range(8, 14):
        flow.settle(f"u{number}", 0)
    assert schedule.cut(flow, 0) == ["u6", "u7", "u8", "u9", "u10", "u11", "u12", "u13"]
    assert schedule.surplus(flow) == ["u6", "u7", "u8", "u9", "u10", "u11", "u12", "u13"], "none was cut yet"


def test_what_is_kept_beyond_a_batch_is_surplus_under_sync_and_of_the_next_batch_otherwise() -> None:
    schedule, flow = Sync(2, gated=True), flow_of(3, settled=range(3))
    flow.cut(schedule.cut(flow, 0) or ())
    assert schedule.surplus(flow) == ["u2"]
    assert ColocateAsync(batch=2, capacity=4, slack=1).surplus(flow) == []


@pytest.mark.parametrize("policy", [ColocateAsync, SeparateAsync])
def test_the_oldest_groups_that_are_ready_are_cut(policy: Any) -> None:
    schedule = policy(batch=2, capacity=4, slack=1)
    flow = flow_of(4, settled=[3, 1])
    assert schedule.cut(flow, 0) == ["u1", "u3"]
    assert policy(batch=3, capacity=4, slack=1).cut(flow, 0) is None


@pytest.mark.parametrize("policy", [ColocateAsync, SeparateAsync])
def test_without_slack_batches_are_cut_in_the_order_of_admission(policy: Any) -> None:
    schedule, flow = policy(batch=2, capacity=4, slack=0), flow_of(4, settled=[1, 2, 3])
    assert schedule.cut(flow, 0) is None
    flow.settle("u0", 0)
    assert schedule.cut(flow, 0) == ["u0", "u1"]


def test_what_is_being_trained_is_in_flight_until_the_sync() -> None:
    schedule, flow = SeparateAsync(batch=2, capacity=4, slack=1), flow_of(4, settled=range(4))
    flow.cut(schedule.cut(flow, 0) or ())
    assert schedule.num_to_admit(flow) == 0
    flow.trained()
    assert schedule.num_to_admit(flow) == 2


def test_a_group_that_is_too_old_is_overdue_unless_it_is_waited_for() -> None:
    schedule = SeparateAsync(batch=2, capacity=4, slack=1)
    flow = flow_of(2, settled=[0])
    flow.admit(["u7"], 0, waits=True)
    assert schedule.overdue(flow, 1) == []
    assert schedule.overdue(flow, 2) == ["u0", "u1"]


def test_a_batch_waits_for_what_would_be_too_old_for_the_next() -> None:
    schedule = SeparateAsync(batch=2, capacity=6, slack=1)
    flow = Flow()
    flow.admit(["slow"], 0, waits=True)
    flow.admit(["u1", "u2", "u3"], 1)
    for uid in ("u1", "u2", "u3"):
        flow.settle(uid, 1)
    assert schedule.cut(flow, 0) == ["u1", "u2"], "it may come with the next batch"
    assert schedule.cut(flow, 1) is None, "it must come with this one"
    flow.settle("slow", 0)
    assert schedule.cut(flow, 1) == ["slow", "u1"]


def test_a_batch_waits_in_time_for_more_than_one_batch_of_what_would_be_too_old() -> None:
    schedule, flow = SeparateAsync(batch=2, capacity=6, slack=2), flow_of(0)
    flow.admit(["slow0", "slow1", "slow2", "slow3"], 0, waits=True)
    flow.admit(["u4", "u5"], 1, waits=True)
    flow.settle("u4", 1)
    flow.settle("u5", 1)
    assert schedule.cut(flow, 0) == ["u4", "u5"], "versions 1 and 2 can train two each of the four"
    assert schedule.cut(flow, 1) is None, "version 2 can train no more than two of them"
    flow.settle("slow2", 0)
    assert schedule.cut(flow, 1) is None
    flow.settle("slow1", 0)
    assert schedule.cut(flow, 1) == ["slow1", "slow2"]


def test_with_several_updates_a_version_a_later_one_of_the_same_version_takes_what_is_late() -> None:
    schedule, flow = SeparateAsync(batch=1, capacity=4, slack=1, updates=2), flow_of(0)
    flow.admit(["slow"], 0, waits=True)
    flow.admit(["u1", "u2"], 1, waits=True)
    flow.settle("u1", 1)
    flow.settle("u2", 1)
    flow.cut(schedule.cut(flow, 1) or ())
    assert flow.in_batches == ["u1"]
    assert schedule.cut(flow, 1) is None, "it is the last batch before the next version"
    flow.settle("slow", 0)
    assert schedule.cut(flow, 1) == ["slow"]
