"""Whatever happens to rollouts, in any order: bounds hold, nothing is lost or trained twice, nothing waits for ever."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowrl.schedule.ahead import Ahead
from flowrl.schedule.base import Schedule
from flowrl.schedule.flow import Flow, prompt_of
from flowrl.schedule.separate_async import SeparateAsync
from flowrl.schedule.sync import Sync


class Run(RuleBasedStateMachine):
    """A run of which only the flow is real; versions are those that engines would have."""

    @initialize(
        batch=st.integers(1, 3),
        updates=st.integers(1, 2),
        slack=st.integers(0, 3),
        ahead=st.integers(0, 3),
        patient=st.booleans(),
        sync=st.booleans(),
        gated=st.booleans(),
    )
    def start(self, batch: int, updates: int, slack: int, ahead: int, patient: bool, sync: bool, gated: bool) -> None:
        self.updates = 1 if sync else updates
        self.prompts = batch * self.updates
        self.capacity = self.prompts * (1 + (0 if sync else min(ahead, slack)))
        self.slack = 0 if sync else slack
        self.schedule: Schedule = (
            Sync(self.prompts, gated)
            if sync
            else SeparateAsync(batch=batch, capacity=self.capacity, slack=slack, patient=patient)
        )
        self.eager, self.gated = sync and not gated, gated
        self.flow, self.version, self.num_cut = Flow(), 0, 0
        self.numbers, self.later = count(), list[str]()
        self.done, self.given_up, self.seen = Counter[str](), Counter[str](), list[str]()
        self.admit()

    def admit(self) -> None:
        for uid in self.schedule.overdue(self.flow, self.version):
            self.give_up(uid, "stale")
        num = self.schedule.num_to_admit(self.flow)
        uids = [self.later.pop(0) if self.later else f"u{next(self.numbers)}" for _ in range(num)]
        self.seen += uids
        self.flow.admit(uids, self.version, self.schedule.patient)

    def give_up(self, uid: str, reason: str) -> None:
        assert self.flow.give_up(uid, reason)  # type: ignore[arg-type]
        self.given_up[uid] += 1
        if reason == "stale":
            self.later.append(f"{prompt_of(uid)}a{self.flow.restarts[prompt_of(uid)]}")

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        unsettled = [group for group in self.flow.groups.values() if not group.settled]
        if unsettled:
            self.settle(data.draw(st.sampled_from(unsettled)).uid, data)

    def finish_all_but_the_oldest(self, stalled: int, data: st.DataObject) -> None:
        unsettled = [group.uid for group in self.flow.groups.values() if not group.settled]
        for uid in unsettled[stalled:]:
            if uid in self.flow.groups:
                self.settle(uid, data)

    def settle(self, uid: str, data: st.DataObject) -> None:
        first = self.flow.groups[uid].version
        self.flow.settle(uid, self.version if self.eager else data.draw(st.integers(first, self.version)))
        self.admit()

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if not self.eager and self.flow.running:
            reason = data.draw(st.sampled_from(["failed", "filtered"] if self.gated else ["failed"]))
            self.give_up(data.draw(st.sampled_from(self.flow.running)).uid, reason)
            self.admit()

    def cut(self) -> None:
        if self.num_cut == self.updates:
            return
        uids = self.schedule.cut(self.flow, self.version)
        if uids is None:
            return
        assert len(uids) == len(set(uids)) == self.prompts // self.updates
        numbers = [self.flow.groups[uid].number for uid in uids]
        assert numbers == sorted(numbers)
        assert self.eager or max(self.flow.groups[uid].age(self.version) for uid in uids) <= self.slack
        self.flow.cut(uids)
        self.num_cut += 1

    @rule(stalled=st.integers(0, 2), changed=st.booleans(), data=st.data())
    def step(self, stalled: int, changed: bool, data: st.DataObject) -> None:
        self.finish_all_but_the_oldest(stalled, data)
        while self.num_cut < self.updates and self.schedule.cut(self.flow, self.version) is not None:
            self.cut()
        if self.num_cut == self.updates:
            self.sync(changed)

    def sync(self, changed: bool) -> None:
        for group in self.flow.groups.values():
            if group.cut and not group.settled:
                self.flow.settle(group.uid, self.version)  # sync walks what still runs
        for uid in self.schedule.surplus(self.flow):
            self.give_up(uid, "surplus")
        self.done.update(self.flow.trained())
        self.version, self.num_cut = self.version + changed, 0
        self.admit()

    @invariant()
    def in_flight_is_never_above_capacity(self) -> None:
        limit = 2 * self.prompts - 1 if isinstance(self.schedule, Sync) and self.gated else self.capacity
        assert len(self.flow.groups) <= limit
        assert not isinstance(self.schedule, Ahead) or len(self.flow.running) <= self.capacity

    @invariant()
    def every_group_is_in_flight_or_trained_or_given_up_once(self) -> None:
        ended = self.done + self.given_up
        assert not ended or max(ended.values()) == 1
        assert sorted([*ended, *self.flow.groups]) == sorted(self.seen)

    @invariant()
    def a_batch_comes_when_everything_has_settled(self) -> None:
        if self.num_cut < self.updates and not self.flow.running and not self.gated:
            assert self.schedule.cut(self.flow, self.version) is not None


Run.TestCase.settings = settings(max_examples=500, stateful_step_count=30, deadline=None)
TestRun = Run.TestCase
