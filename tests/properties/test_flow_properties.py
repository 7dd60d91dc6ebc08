"""Whatever happens to rollouts, in any order: bounds hold, nothing is lost or trained twice, nothing waits for ever."""

from __future__ import annotations

import copy
import json
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import flowrl
from flowrl import Gate, Prompt, Sample
from flowrl.batch import Batch
from flowrl.data import stream
from flowrl.data.stream import PromptStream
from flowrl.engine.call import Receipt
from flowrl.engine.dispatch import Arrival, Late
from flowrl.engine.front import Front
from flowrl.engine.store import Store
from flowrl.graph.plan import Plan
from flowrl.rows import Rows
from flowrl.schedule.flow import AGAIN, PATIENCE, Reason
from flowrl.schedule.policy import schedule_of

STUBS = Path(__file__).parents[1] / "stub_nodes.py"
UNSETTLED_FOR_EVER = 100
MOSTLY = st.sampled_from([True, True, True, False])


class Sieve(Gate):
    """Stands for a gate: what it keeps is drawn."""

    class Out(NamedTuple):
        keep: Prompt[bool]

    def run(self, response: Sample[str]) -> Out:
        raise NotImplementedError


@cache
def plan_of(mode: str, batch: int, updates: int, slack: int, ahead: int, stale: str, gated: bool) -> Plan:
    schedule: dict[str, Any] = {"mode": mode}
    if mode != "sync":
        schedule |= {"max_staleness": slack, "warmup_batches": ahead, "stale": stale, "max_restarts": 2}
    if mode == "separate_async":
        schedule["updates_per_sync"] = updates
    else:
        updates = 1
    gate = {"use": f"{Path(__file__)}:Sieve", "gate": "keep", "max_rounds": 3, "when_short": "short"}
    return flowrl.Pipeline({
        "flowrl": 1,
        "name": "flows",
        "models": {"policy": {"path": "arith-tiny", "trainable": True}},
        "data": {"train": {"type": "arithmetic", "size": 4096}},
        "batch": {"prompts": batch * updates, "group": 2},
        "pools": {"train": {}, "generate": {} if mode == "separate_async" else {"shares": "train"}},
        "schedule": schedule,
        "nodes": {
            "rollout": {
                "use": "rollout.generate", "model": "policy", "pool": "generate", "engine": "fake", "max_tokens": 3,
            },
            **({"sieve": gate} if gated else {}),
            "update": {"use": f"{STUBS}:Update", "model": "policy", "pool": "train"},
            "sync": {"use": f"{STUBS}:Sync", "model": "policy"},
        },
    }).plan()  # fmt: skip


class Run(RuleBasedStateMachine):
    """A run with the real front, flow, schedule and checkpoint state; engines and training are the rules."""

    @initialize(
        mode=st.sampled_from(["sync", "colocate_async", "separate_async"]),
        batch=st.integers(1, 3),
        updates=st.integers(1, 2),
        slack=st.integers(0, 3),
        ahead=st.integers(0, 3),
        stale=st.sampled_from(["drop", "wait"]),
        gated=st.booleans(),
    )
    def start(self, mode: str, batch: int, updates: int, slack: int, ahead: int, stale: str, gated: bool) -> None:
        self.plan = plan_of(mode, batch, updates, slack, ahead, stale, gated)
        self.schedule = schedule_of(self.plan)
        self.prompts, self.updates = self.plan.document.batch.prompts, self.plan.updates_per_sync
        self.capacity, self.slack = self.plan.document.prompts_in_flight, self.plan.slack
        self.eager, self.rounds = mode == "sync" and not gated, gated and not self.slack and self.updates == 1
        self.version, self.step, self.num_cut = 0, 1, 0
        self.trained, self.given_up, self.seen = Counter[str](), Counter[str](), set[str]()
        self.front = self.made()
        self.front.begin(1)
        self.save()
        self.front.admit(0)
        self.look()

    def made(self) -> Front:
        """A front without groups; engines and store are those of one process."""
        cluster = SimpleNamespace(put=lambda batch: batch, fetch=lambda refs: refs)
        sampler = SimpleNamespace(begin=lambda step, batch: None, leave=lambda uids: None)
        dispatcher: Any = SimpleNamespace(cluster=cluster, store=Store(), sampler=sampler, abort=lambda uids: None)
        self.stalled, self.gone_before = set[str](), 0
        self.reasons: list[tuple[str, str]] = []
        front = Front(self.plan, self.schedule, PromptStream(self.plan.document.data["train"].load(), 0), dispatcher)
        give_up = front.flow.give_up

        def told(uid: str, reason: Reason) -> bool:
            gone = give_up(uid, reason)
            self.reasons += [(uid, reason)] * gone
            return gone

        front.flow.give_up = told  # type: ignore[method-assign]
        return front

    @property
    def paused(self) -> bool:
        """Whether engines sleep."""
        return self.schedule.pauses and self.num_cut > 0

    @property
    def unsettled(self) -> list[str]:
        """Groups that engines work on."""
        return [uid for uid, group in self.front.flow.groups.items() if not group.settled]

    def look(self) -> None:
        """Take note of groups that came and went."""
        now = set(self.front.flow.groups)
        for uid in self.seen - now - {*self.trained, *self.given_up}:
            self.given_up[uid] += 1
        self.seen |= now

    # What happens to groups

    def settle(self, uid: str, data: st.DataObject, lost: bool = False) -> None:
        group = self.front.flow.groups[uid]
        sessions = [] if lost else [0, 1]
        oldest = (
            {}
            if lost
            else {uid: self.version if self.eager else data.draw(st.sampled_from([group.version, self.version]))}
        )
        rows = Rows([uid], [0] * len(sessions), sessions)
        columns = {"response": Sample(rows, np.array(["1"] * len(sessions), dtype=object))}
        types = {"response": self.plan.graph.fields["response"].type}
        self.arrive("rollout", uid, Batch(rows, columns, types), oldest)
        if self.plan.gate is not None and uid in self.front.flow.groups:
            gate_rows = Rows([uid], [0, 0], [0, 1])
            keep = Prompt(gate_rows, np.array([data.draw(st.booleans())]))
            self.arrive(
                "sieve", uid, Batch(gate_rows, {"keep": keep}, {"keep": self.plan.graph.fields["keep"].type}), {}
            )
        self.look()
        if not self.eager:
            self.front.admit(self.version)
        self.look()

    def arrive(self, node: str, uid: str, batch: Batch, oldest: dict[str, int]) -> None:
        fields = (tuple(batch.columns),)
        receipt = Receipt(
            node, self.step, 1, "train/0", batch.rows, (uid,), 0.0, 0.0, 0, 0, fields=fields, oldest=oldest
        )
        self.front.progress.submit(node, [uid])
        if node == "rollout":
            self.front.store.add(batch, batch.columns, batch.rows)
        self.front.holds(receipt)
        self.front.collect(Arrival(node, receipt, [batch], self.front.progress))

    @precondition(lambda self: not self.paused and self.unsettled)
    @rule(data=st.data(), lost=st.booleans())
    def finish_or_fail(self, data: st.DataObject, lost: bool) -> None:
        self.settle(data.draw(st.sampled_from(self.unsettled)), data, lost)

    @precondition(lambda self: not self.paused and self.unsettled)
    @rule(data=st.data())
    def stall(self, data: st.DataObject) -> None:
        self.stalled.add(data.draw(st.sampled_from(self.unsettled)))

    @precondition(lambda self: not self.paused and self.stalled)
    @rule()
    def time_out(self) -> None:
        late = [uid for uid in self.unsettled if uid in self.stalled]
        self.stalled.clear()
        if late:
            progress, node = self.front.progress, self.plan.graph.nodes["rollout"]
            progress.submit("rollout", late)
            named = self.front.late(Late(node, "train/0", (*late, "u0gone"), progress))
            assert named.split(" ")[: len(late)] == [f"{uid}," for uid in late[:-1]] + late[-1:]
            self.look()
            if not self.eager:
                self.front.admit(self.version)
            self.look()

    # What the loop does

    @precondition(lambda self: self.num_cut < self.updates)
    @rule()
    def cut(self) -> None:
        self.front.admit(self.version)
        self.look()
        uids = self.front.cut(self.version)
        if uids is None:
            return
        size = self.prompts // self.updates
        assert len(uids) == len(set(uids)) <= size
        assert len(uids) == size or self.plan.gate is not None, "only behind a gate a batch may be short"
        numbers = [self.front.flow.groups[uid].number for uid in uids]
        assert numbers == sorted(numbers)
        ages = [self.front.flow.groups[uid].age(self.version) for uid in uids]
        assert self.eager or max(ages, default=0) <= self.slack
        self.num_cut += 1

    @rule(data=st.data(), slow=st.integers(0, 4), old=st.booleans(), changed=MOSTLY, saves=st.booleans())
    def train_and_sync(self, data: st.DataObject, slow: int, old: bool, changed: bool, saves: bool) -> None:
        """The loop waits until all batches of the step are there: what does not end is late; the `old` may be slow."""
        for _ in range(UNSETTLED_FOR_EVER):
            if self.num_cut < self.updates:
                self.cut()
            if self.num_cut == self.updates:
                break
            running = [uid for uid in self.unsettled if uid not in self.stalled]
            for uid in running[:: -1 if old else 1][: max(1, len(running) - slow)]:
                if uid in self.front.flow.groups:
                    self.settle(uid, data)
            if not running:
                self.time_out()
        else:
            raise AssertionError("no batch can be cut, whatever settles")
        if self.eager:
            for uid in self.unsettled:
                self.settle(uid, data)  # sync walks what still runs
        assert all(group.settled for group in self.front.flow.groups.values() if group.cut)
        done = [uid for uid, group in self.front.flow.groups.items() if group.cut]
        self.front.end()
        self.trained.update(done)
        self.look()
        self.version, self.step, self.num_cut = self.version + changed, self.step + 1, 0
        if saves:
            self.save()
        self.front.begin(self.step)
        self.front.admit(self.version)
        self.look()

    def save(self) -> None:
        self.alive_then = sorted(self.alive)
        self.saved = copy.deepcopy((
            self.front.state(), self.front.in_flight(), self.version, self.step, self.trained, self.given_up, self.seen,
        ))  # fmt: skip

    @precondition(lambda self: self.step > 2)
    @rule()
    def kill_and_resume(self) -> None:
        saved = copy.deepcopy(self.saved)
        state, in_flight, self.version, self.step, self.trained, self.given_up, self.seen = saved
        state = json.loads(json.dumps(state))
        ready = {
            stream.Prompt(*group["prompt"]).uid
            for group in state.get("flow", {"groups": []})["groups"]
            if group["settled"] and self.version - (group["oldest"] or group["version"]) <= self.slack
        }
        self.front, self.num_cut = self.made(), 0
        self.front.prompts.load_state(state)
        self.front.restore(state, in_flight, self.version)
        assert {group.uid for group in self.front.flow.ready} == ready, "finished groups of use are there again"
        parts = self.front.store.find(["response"], sorted(ready))
        assert {uid for part in parts for uid in part.uids} >= ready, "with their trajectories"
        assert sorted(self.alive) == self.alive_then, "what was in flight or to be tried again is so still"
        self.front.begin(self.step)
        self.gone_before = len(self.gone) - self.gone_for_a_reason
        self.front.admit(self.version)
        self.look()

    # What always holds

    @invariant()
    def in_flight_is_never_above_capacity(self) -> None:
        groups = self.front.flow.groups.values()
        assert len(groups) <= (2 * self.prompts - 1 if self.rounds else self.capacity)

    @invariant()
    def every_group_is_in_flight_or_trained_or_given_up_once(self) -> None:
        ended = self.trained + self.given_up
        assert not ended or max(ended.values()) == 1
        assert sorted([*ended, *self.front.flow.groups]) == sorted(self.seen)

    @invariant()
    def every_prompt_is_trained_once_or_accounted_for(self) -> None:
        by_prompt = Counter(prompt_of(uid) for uid in self.trained)
        assert not by_prompt or max(by_prompt.values()) == 1
        alive = self.alive
        assert len(alive) == len(set(alive)), "a prompt is tried twice at once"
        assert not set(alive) & set(by_prompt), "a prompt that was trained is tried again"
        assert len(self.gone) == self.gone_before + self.gone_for_a_reason

    @property
    def alive(self) -> list[str]:
        """Prompts that are in flight or to be tried again."""
        retried = (prompt.uid for prompt in (*self.front.again, *self.front.later))
        return [prompt_of(uid) for uid in (*self.front.flow.groups, *retried)]

    @property
    def gone(self) -> set[str]:
        """Prompts that were given up for good."""
        return {*map(prompt_of, self.given_up)} - {*self.alive} - {*map(prompt_of, self.trained)}

    @property
    def gone_for_a_reason(self) -> int:
        """How many of them the flow has counted since it was made."""
        last = self.front.max_restarts
        return sum(reason not in AGAIN or attempt_of(uid) == last for uid, reason in self.reasons)

    @invariant()
    def a_prompt_is_given_up_for_its_age_no_more_than_so_often(self) -> None:
        assert all(attempt_of(uid) < PATIENCE for uid, reason in self.reasons if reason == "stale")


def prompt_of(uid: str) -> str:
    return uid.partition("a")[0]


def attempt_of(uid: str) -> int:
    return int(uid.partition("a")[2] or 0)


Run.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
TestRun = Run.TestCase
