"""The front of the graph: prompts in flight, and what becomes of their groups until a batch is cut of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from flowrl.batch import Batch, Prompt
from flowrl.column import Column, as_array
from flowrl.data import stream
from flowrl.engine.cluster import Cluster
from flowrl.engine.dispatch import Arrival
from flowrl.engine.samples import Sampler
from flowrl.engine.store import Store
from flowrl.errors import RunError
from flowrl.gate import Gate, limits_of
from flowrl.graph.build import DATA, Graph
from flowrl.graph.plan import Plan
from flowrl.rows import Rows
from flowrl.schedule.base import Progress
from flowrl.schedule.flow import Flow, Reason, prompt_of
from flowrl.schedule.policy import schedule_of


class Front:
    """Admits prompts as the schedule wants it, and follows their groups until they are trained or given up."""

    def __init__(
        self, plan: Plan, cluster: Cluster, prompts: stream.PromptStream, store: Store, sampler: Sampler
    ) -> None:
        self.plan, self.cluster, self.prompts, self.store, self.sampler = plan, cluster, prompts, store, sampler
        self.schedule, self.flow = schedule_of(plan), Flow()
        # Without slack all groups of a batch are admitted together; else whatever is there is worked on.
        canonical = {} if plan.slack else plan.canonical_groups
        self.progress = Progress(plan.graph.restricted(plan.front), 0, canonical=canonical)
        self.rows: dict[str, stream.Prompt] = {}
        """The prompts in flight, by uid."""
        self.later: list[stream.Prompt] = []
        """Prompts whose groups were given up for their age: they come first in the next step."""
        self.again: list[stream.Prompt] = []
        self.limits = limits_of(plan.gate.node if plan.gate is not None and plan.gate.node is not None else Gate())
        self.num_sessions = Counter[str]()
        """By group, the trajectories that it has."""

    def begin(self, step: int) -> None:
        """A step begins; which prompts it admits first is what people may look at."""
        self.progress.step, self.again, self.later = step, self.later, []

    def admit(self, version: int) -> None:
        """Give up what is too old, and admit as many prompts as the schedule wants."""
        for uid in self.schedule.overdue(self.flow, version):
            self.give_up(uid, "stale")
        num = min(self.schedule.num_to_admit(self.flow), self.room)
        if not num:
            return
        again, self.again = self.again[:num], self.again[num:]
        prompts = again + (self.prompts.take(num - len(again)) if num > len(again) else [])
        batch = admit(self.store, self.cluster, self.plan.graph, prompts, self.plan.document.batch.group)
        self.rows |= {prompt.uid: prompt for prompt in prompts}
        self.sampler.begin(self.progress.step, batch)
        self.flow.admit(batch.rows.uids, version, self.schedule.patient)
        self.progress.admit(batch.rows.uids)

    @property
    def room(self) -> int:
        """Prompts that may still be admitted before the next batch: behind a gate, as many as `max_rounds` allows."""
        if self.plan.gate is None:
            return self.plan.document.prompts_in_flight
        prompts, ahead = self.plan.document.batch.prompts, self.plan.document.prompts_in_flight
        return (self.limits.max_rounds - 1) * prompts + ahead - self.flow.admitted

    def cut(self, version: int) -> Sequence[str] | None:
        """The groups of the next batch; None while there is none."""
        uids = self.schedule.cut(self.flow, version)
        if uids is None and self.room <= 0 and not self.flow.running:
            uids = self.short_batch()
        if uids is not None:
            self.flow.cut(uids)
        return uids

    def short_batch(self) -> Sequence[str]:
        """What to train when the gate has kept too few groups."""
        num, asked = len(self.flow.ready), self.plan.document.batch.prompts // self.plan.updates_per_sync
        if self.limits.when_short == "fail":
            assert self.plan.gate is not None, "only a gate refuses groups"
            fact = f"step {self.progress.step}: only {num} of {asked} groups were kept of {self.flow.admitted} tried"
            fix = "see groups/* in metrics.jsonl; other prompts, a larger batch.group, max_rounds, or when_short: short"
            raise RunError(f"{fact} ({fix})", node=self.plan.gate.name)
        return [group.uid for group in self.flow.ready] if self.limits.when_short == "short" else []

    def collect(self, arrival: Arrival) -> None:
        """Settle the groups of a block."""
        receipt, node = arrival.receipt, self.plan.graph.nodes[arrival.node]
        self.progress.settle(node.name, receipt.settled)
        if late := [uid for uid in receipt.settled if uid not in self.flow.groups]:
            self.store.forget(late)
        if node.weights == "generates":
            self.num_sessions.update(receipt.rows.uids[group] for group in receipt.rows.group.tolist())
        if node is self.plan.gate:
            gate = node.spec.gate or ""
            refs = [ref for ref, fields in zip(arrival.refs, receipt.fields, strict=False) if gate in fields]
            for uid in refused(self.cluster.fetch(refs), gate):
                self.give_up(uid, "filtered")
        for uid in receipt.settled:
            if uid not in self.flow.groups or not self.progress.has_settled(uid):
                continue
            if self.schedule.serves and not self.num_sessions[uid]:
                self.give_up(uid, "failed")
            else:
                self.flow.settle(uid, receipt.oldest.get(uid))

    def give_up(self, uid: str, reason: Reason) -> None:
        """A group will not be trained. One that is too old is tried again in the next step, as another attempt."""
        if not self.flow.give_up(uid, reason):
            return
        prompt = self.rows[uid]
        if reason == "stale":
            attempt = self.flow.evictions[prompt_of(uid)]
            self.later.append(prompt._replace(uid=f"{prompt_of(uid)}a{attempt}"))
        self.leave([uid])

    def leave(self, uids: Iterable[str]) -> None:
        """Groups are in flight no more."""
        gone = list(uids)
        self.progress.forget(gone)
        self.store.forget(gone)
        self.sampler.leave(gone)
        for uid in gone:
            del self.rows[uid]
            self.num_sessions.pop(uid, None)

    def end(self) -> None:
        """A step has ended: its groups are trained."""
        for uid in self.schedule.surplus(self.flow):
            self.give_up(uid, "surplus")
        self.leave(self.flow.trained())


def refused(batches: Iterable[Batch], field: str) -> list[str]:
    """The groups that a gate refuses."""
    return [uid for b in batches for uid, keep in zip(b.rows.uids, b.columns[field].values, strict=True) if not keep]


def admit(
    store: Store, cluster: Cluster, graph: Graph, prompts: Sequence[stream.Prompt], num_sessions: int
) -> Batch:
    """Put the columns of prompts that a part of the graph reads where its nodes find them, and return them."""
    num = len(prompts)
    rows = Rows([prompt.uid for prompt in prompts], planned=[num_sessions] * num, settled=[0] * num)
    fields = [field for field in graph.fields.values() if field.writer == DATA and field.readers]
    columns: dict[str, Column[Any]] = {
        f.name: Prompt(rows, as_array([prompt.row[f.name] for prompt in prompts], f.type.dtype)) for f in fields
    }
    batch = Batch(rows, columns, {f.name: f.type for f in fields})
    if columns:
        store.add(cluster.put(batch), columns, rows)
    return batch
