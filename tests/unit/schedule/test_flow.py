"""Who is in flight, and that whoever leaves does so once."""

from __future__ import annotations

from flowrl.schedule.flow import Flow


def flow_of(*uids: str, version: int = 0) -> Flow:
    flow = Flow()
    flow.admit(uids, version)
    return flow


def test_a_group_is_running_then_ready_then_part_of_a_batch_then_gone() -> None:
    flow = flow_of("u0", "u1")
    assert [group.uid for group in flow.running] == ["u0", "u1"]
    flow.settle("u1", oldest=0)
    assert ([group.uid for group in flow.running], [group.uid for group in flow.ready]) == (["u0"], ["u1"])
    flow.cut(["u1"])
    assert [group.uid for group in flow.waiting] == ["u0"]
    assert flow.trained() == ["u1"] and list(flow.groups) == ["u0"]


def test_a_group_leaves_for_one_reason_however_many_there_are() -> None:
    flow = flow_of("u0", "u1")
    assert flow.give_up("u0", "filtered")
    assert not flow.give_up("u0", "stale")
    assert dict(flow.given_up) == {"filtered": 1}
    assert list(flow.groups) == ["u1"]


def test_age_counts_from_the_oldest_token_once_it_is_known() -> None:
    flow = flow_of("u0", version=3)
    assert flow.groups["u0"].age(5) == 2
    flow.settle("u0", oldest=4)
    assert flow.groups["u0"].age(5) == 1


def test_what_was_admitted_and_refused_is_counted_from_the_last_cut_on() -> None:
    flow = flow_of("u0", "u1", "u2")
    flow.give_up("u0", "filtered")
    assert (flow.admitted, flow.refused) == (3, 1)
    flow.cut(["u1"])
    assert (flow.admitted, flow.refused) == (0, 0)
