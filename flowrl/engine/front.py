"""The front of the graph: prompts in flight, and what becomes of their groups until a batch is cut of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from flowrl.batch import Batch, Prompt
from flowrl.column import Column, as_array
from flowrl.data import stream
from flowrl.engine.call import Receipt
from flowrl.engine.checkpoint import InFlight
from flowrl.engine.cluster import Cluster
from flowrl.engine.dispatch import Arrival, Dispatcher, Late
from flowrl.engine.store import Store
from flowrl.errors import RunError
from flowrl.gate import Gate, limits_of
from flowrl.graph.build import DATA, Graph
from flowrl.graph.plan import Plan
from flowrl.join import take_groups
from flowrl.rows import Rows
from flowrl.schedule.base import Progress, Schedule
from flowrl.schedule.flow import AGAIN, PATIENCE, Flow, Reason


class Front:
    """Admits prompts as the schedule wants it, and follows their groups until they are trained or given up."""

    def __init__(self, plan: Plan, schedule: Schedule, prompts: stream.PromptStream, dispatcher: Dispatcher) -> None:
        self.plan, self.schedule, self.prompts, self.dispatcher = plan, schedule, prompts, dispatcher
        self.cluster, self.store, self.sampler = dispatcher.cluster, dispatcher.store, dispatcher.sampler
        self.flow = Flow()
        # Without slack all groups of a batch are admitted together; else whatever is there is worked on.
        canonical = {} if plan.slack else plan.canonical_groups
        # No more than a batch at a time, so that what is reported can be told apart by the step that trains it.
        most = plan.groups_per_batch if schedule.serves else None
        self.progress = Progress(plan.graph.restricted(plan.front), 0, canonical=canonical, most=most)
        self.rollouts = [name for name in plan.front if plan.graph.nodes[name].weights == "generates"]
        self.rows: dict[str, stream.Prompt] = {}
        """The prompts in flight, by uid."""
        self.later: list[stream.Prompt] = []
        """Prompts that are tried again: they come first in the next step."""
        self.again: list[stream.Prompt] = []
        self.max_restarts = getattr(plan.document.schedule, "max_restarts", 0)
        self.limits = limits_of(plan.gate.node if plan.gate is not None and plan.gate.node is not None else Gate())
        self.held: list[Receipt] = []
        """Receipts of groups that are part of no batch yet: what they report is of the step that trains them."""
        self.lengths = Counter[str]()
        """Of groups given up for their age in this step, by the length of their longest response."""
        self.told = Counter[Reason]()
        """What was given up until the end of the last step."""
        self.num_late = 0
        """Groups that had no end within a timeout in this step."""

    def begin(self, step: int) -> None:
        """A step begins; which prompts it admits first is what people may look at."""
        self.progress.step, self.again, self.later = step, [*self.again, *self.later], []

    def admit(self, version: int) -> None:
        """Give up what is too old, and admit as many prompts as the schedule wants."""
        for uid in self.schedule.overdue(self.flow, version):
            self.give_up(uid, "stale")
        num = min(self.schedule.num_to_admit(self.flow), self.room)
        if not num:
            return
        again, self.again = self.again[:num], self.again[num:]
        prompts = again + (self.prompts.take(num - len(again)) if num > len(again) else [])
        self.sampler.begin(self.progress.step, self.put_in_flight(prompts, version))

    def put_in_flight(self, prompts: Sequence[stream.Prompt], version: int) -> Batch:
        """Let prompts flow; their columns."""
        batch = admit(self.store, self.cluster, self.plan.graph, prompts, self.plan.document.batch.group)
        self.rows |= {prompt.uid: prompt for prompt in prompts}
        for prompt in prompts:
            self.flow.admit([prompt.uid], version, self.schedule.patient or prompt.attempt >= PATIENCE)
        self.progress.admit(batch.rows.uids)
        return batch

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
        num, asked = len(self.flow.ready), self.plan.groups_per_batch
        if self.limits.when_short == "fail":
            assert self.plan.gate is not None, "only a gate refuses groups"
            fact = f"step {self.progress.step}: only {num} of {asked} groups were kept of {self.flow.admitted} tried"
            fix = "see groups/* in metrics.jsonl; other prompts, a larger batch.group, max_rounds, or when_short: short"
            raise RunError(f"{fact} ({fix})", node=self.plan.gate.name)
        return [group.uid for group in self.flow.ready] if self.limits.when_short == "short" else []

    def holds(self, receipt: Receipt) -> bool:
        """Whether what a block reports is of a later step: its groups are part of no batch yet."""
        groups = [self.flow.groups[uid] for uid in receipt.settled if uid in self.flow.groups]
        if receipt.failed or not groups or any(group.cut for group in groups):
            return False
        self.held.append(receipt)
        return True

    def reported(self) -> list[Receipt]:
        """Of what was held back, that of groups of which one has been cut or none is left."""
        held, self.held = self.held, []
        return [receipt for receipt in held if not self.holds(receipt)]

    def collect(self, arrival: Arrival, ahead: int = 0) -> None:
        """Settle the groups of a block; versions of the run are `ahead` of those of the node's model."""
        receipt, node = arrival.receipt, self.plan.graph.nodes[arrival.node]
        self.progress.settle(node.name, receipt.settled)
        if late := [uid for uid in receipt.settled if uid not in self.flow.groups]:
            self.store.forget(late)
        if node.weights == "generates":
            self.generated(receipt, ahead)
        if node is self.plan.gate:
            kept = self.kept(arrival, node.spec.gate or "")
            for uid in receipt.settled:
                if uid not in kept:
                    self.give_up(uid, "filtered")
        for uid in receipt.settled:
            if uid in self.flow.groups and self.progress.has_settled(uid):
                self.flow.settle(uid)

    def generated(self, receipt: Receipt, ahead: int) -> None:
        """Take note of what groups consist of; one without any trajectory is replaced where it can be."""
        num_sessions = Counter(receipt.rows.uids[group] for group in receipt.rows.group.tolist())
        for uid in receipt.settled:
            if uid in self.flow.groups:
                group, version = self.flow.groups[uid], receipt.oldest.get(uid)
                version = None if version is None else version + ahead
                if version is not None and version < group.version:
                    fact = f"a token was made with version {version} of the weights, after the sync of {group.version}"
                    raise RunError(fact, node=receipt.node, worker=receipt.worker, rows=[uid])
                group.num_sessions += num_sessions[uid]
                group.oldest = min((v for v in (group.oldest, version) if v is not None), default=None)
                group.longest = max(group.longest or 0, receipt.longest.get(uid, 0))
                ended = all(uid in self.progress.settled(rollout) for rollout in self.rollouts)
                if ended and not group.num_sessions and (self.schedule.serves or self.plan.gate is not None):
                    self.give_up(uid, "failed")

    def kept(self, arrival: Arrival, field: str) -> set[str]:
        """The groups of a block that the gate keeps."""
        refs = [ref for ref, fields in zip(arrival.refs, arrival.receipt.fields, strict=False) if field in fields]
        batches = self.cluster.fetch(refs)
        return {uid for b in batches for uid, keep in zip(b.rows.uids, b.columns[field].values, strict=True) if keep}

    def give_up(self, uid: str, reason: Reason) -> None:
        """A group will not be trained; for some reasons its prompt is tried again in the next step."""
        group = self.flow.groups.get(uid)
        if group is None or not self.flow.give_up(uid, reason):
            return
        if reason == "stale":
            self.lengths[bucket(group.longest)] += 1
        prompt = self.rows[uid]
        if reason in AGAIN and prompt.attempt < self.max_restarts:
            self.later.append(prompt._replace(attempt=prompt.attempt + 1))
        if not group.settled and reason == "stale":
            self.dispatcher.abort([uid])
        self.leave([uid])

    def late(self, news: Late) -> str:
        """Groups had no end within their timeout: which ones, and what becomes of them, for people; empty if none.

        Where the schedule replaces groups they are given up; else, and in a validation, they settle with what there is.
        """
        running = news.progress.running(news.node.name)
        late = [uid for uid in news.uids if uid in running]
        in_training = news.progress is self.progress
        self.num_late += len(late) if in_training else 0
        replaced = self.schedule.serves and in_training
        for uid in late if replaced else ():
            self.give_up(uid, "late")
        fate = "are replaced" if replaced else "end with what they have"
        return f"{', '.join(late)} {fate}" if late else ""

    def leave(self, uids: Iterable[str]) -> None:
        """Groups are in flight no more."""
        gone = list(uids)
        self.progress.forget(gone)
        self.store.forget(gone)
        self.sampler.leave(gone)
        for uid in gone:
            del self.rows[uid]

    def end(self) -> dict[str, float]:
        """A step has ended: its groups are trained. What was measured of those in flight, where it says anything."""
        for uid in self.schedule.surplus(self.flow):
            self.give_up(uid, "surplus")
        self.leave(self.flow.trained())
        before, self.told = self.told, Counter(self.flow.given_up)
        num_late, self.num_late = self.num_late, 0
        limited = any(self.plan.graph.nodes[rollout].spec.timeout for rollout in self.rollouts)
        late = {"rollout/late": float(num_late)} if limited else {}
        if not self.schedule.serves and self.plan.gate is None:
            return late
        lost = {f"rollout/given_up/{reason}": float(self.told[reason] - before[reason]) for reason in get_args(Reason)}
        lengths, self.lengths = self.lengths, Counter()
        lost |= {f"rollout/given_up/stale/{name}": float(num) for name, num in lengths.items()}
        return late | lost | {"rollout/in_flight": float(len(self.flow.groups))}

    def state(self) -> dict[str, Any]:
        """The place in the data and the prompts in flight, for a checkpoint."""
        groups = [
            {
                "prompt": self.rows[g.uid], "version": g.version, "oldest": g.oldest, "longest": g.longest,
                "settled": g.settled,
            }
            for g in self.flow.groups.values()
        ]  # fmt: skip
        later = [*self.again, *self.later]
        flow = {"front": sorted(self.plan.front), "groups": groups, "later": later}
        return {**self.prompts.state(), "flow": flow} if groups or later else self.prompts.state()

    def in_flight(self) -> tuple[list[Batch], list[Receipt]]:
        """The columns of the groups that wait for a batch, and what is still to be reported, for a checkpoint."""
        uids = [group.uid for group in self.flow.ready]
        parts = self.store.holding(uids)
        columns = self.cluster.fetch([part.ref for part in parts]) if parts else []
        return [take_groups(batch, uids) for batch in columns], self.held

    def restore(self, state: Mapping[str, Any], in_flight: InFlight, version: int) -> None:
        """Take up what was in flight: groups that were ready are so again, others are generated anew in their place.

        Under other settings than they were started with, so are those that would be too old in their turn, and what is
        beyond the capacity comes later.
        """
        flow = state.get("flow")
        if flow is None or state["cursor"] != self.prompts.state()["cursor"]:
            return  # other data: nothing of it is in flight
        capacity, same = self.plan.document.prompts_in_flight, flow["front"] == sorted(self.plan.front)
        later = [*(group["prompt"] for group in flow["groups"][capacity:]), *flow["later"]]
        self.later = [stream.Prompt(*prompt) for prompt in later]
        ready: list[str] = []
        for group in flow["groups"][:capacity]:
            prompt = stream.Prompt(*group["prompt"])
            uid, oldest = prompt.uid, group["version"] if group["oldest"] is None else group["oldest"]
            turn = len(ready) // self.plan.document.batch.prompts
            whole = group["settled"] and same and version - oldest + turn <= self.plan.slack
            self.put_in_flight([prompt], group["version"] if whole else version)
            if whole:
                for name in self.plan.front:
                    self.progress.submit(name, [uid])
                    self.progress.settle(name, [uid])
                self.flow.settle(uid, group["oldest"])
                self.flow.groups[uid].longest = group["longest"]
                ready.append(uid)
        columns, receipts = in_flight
        for batch in (take_groups(columns_of, ready) for columns_of in columns if ready):
            self.store.add(self.cluster.put(batch), batch.columns, batch.rows)
        kept = set(ready)
        self.held = [receipt for receipt in receipts if not kept.isdisjoint(receipt.settled)]


def admit(store: Store, cluster: Cluster, graph: Graph, prompts: Sequence[stream.Prompt], num_sessions: int) -> Batch:
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


def bucket(num_tokens: int | None) -> str:
    """The power of two that a length does not exceed; None is of a response that has not ended."""
    return "unfinished" if num_tokens is None else f"up_to_{1 << max(num_tokens - 1, 0).bit_length()}"
