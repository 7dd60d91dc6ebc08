"""Costs from a run: how long its nodes took, by its event log, and how much it generated, by its metrics.

The run must have been under `sync`: there all prompts of a worker begin at the same time, so that what the event log
says of the end of each is how long it took.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.simulate.costs import Costs, Decoding, Observed, Response
from flowrl.spec.document import Document, SyncSchedule
from flowrl.spec.read import read_document

TOKENS, LONGEST = "rollout/tokens", "rollout/response_length/max"
ENGINE, KEPT = "time/engine", "groups/kept"
_METRICS = {TOKENS, LONGEST, ENGINE, KEPT}
BETTER = 0.8
"""A speed that depends on the number of sequences must leave at most so much of the error of one that does not."""
EXACT = 1e-6
"""Squared error of a fit, as a share of the squares, that leaves nothing to explain."""
_EVENT: Mapping[str, Any] = {
    "node": str, "worker": str, "step": int, "rows": list, "failures": list, "start": int | float, "end": int | float,
}  # fmt: skip


class BadRun(Exception):
    """A run that says nothing about time."""


@dataclass(frozen=True)
class Log:
    """What a run has left, without its first step, in which everything happens for the first time."""

    document: Document
    events: Sequence[Mapping[str, Any]]
    metrics: Mapping[int, Mapping[str, float]]
    """By step."""

    @property
    def groups(self) -> int:
        """Prompts of a step."""
        return self.document.batch.prompts

    def of(self, node: str) -> list[Mapping[str, Any]]:
        """The events of a node."""
        return [event for event in self.events if event["node"] == node]


def read_log(folder: Path) -> Log:
    """The records of a run. Raises `BadRun`."""
    document = read_document(folder / "pipeline.yaml").document
    if document is None:
        raise BadRun(f"{folder / 'pipeline.yaml'} cannot be read: flowrl check says why")
    if not isinstance(document.schedule, SyncSchedule):
        raise BadRun(
            f"{folder.name} ran under {document.schedule.mode}; costs are read from a run under sync, where nothing "
            f"overlaps: run a few steps with --set 'schedule={{mode: sync}}'"
        )
    lines = _lines(folder / "events.jsonl", _fault_of_event)
    events = [event for event in lines if not event["failures"] and not _validates(event)]
    metrics = {line["step"]: line for line in _lines(folder / "metrics.jsonl", _fault_of_metrics) if line["step"] > 0}
    later = {step for step in metrics if step > min(metrics)} or set(metrics)
    if not later:
        raise BadRun(f"{folder.name} has finished no step")
    kept = [event for event in events if event["step"] in later]
    return Log(document, kept, {step: metrics[step] for step in sorted(later)})


def _lines(path: Path, fault_of: Callable[[Any], str]) -> Iterator[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        raise BadRun(f"cannot read {path}: {error.strerror or error}") from None
    for number, line in enumerate(text.split("\n")[:-1], 1):  # the last one may have been broken off
        try:
            found = json.loads(line)
        except ValueError:
            raise BadRun(f"{path}, line {number}, is no JSON") from None
        if fault := fault_of(found):
            raise BadRun(f"{path}, line {number}, {fault}")
        yield found


def _fault_of_event(found: Any) -> str:
    """What keeps a line of the event log from saying when a node ran; empty if nothing does."""
    if not isinstance(found, dict) or not all(isinstance(found.get(key), kind) for key, kind in _EVENT.items()):
        return "is no event of a run"
    if not all(isinstance(row, str) for row in found["rows"]) or not isfinite(found["start"] + found["end"]):
        return "is no event of a run"
    if found["end"] < found["start"]:
        return f"says that {found['node']} ended before it began: the clock was set back; measure again"
    return ""


def _fault_of_metrics(found: Any) -> str:
    """What keeps a line from being the metrics of a step."""
    if not isinstance(found, dict) or not isinstance(found.get("step"), int):
        return "is not of a step"
    for name in _METRICS & found.keys():
        value = found[name]
        if value is not None and not (isinstance(value, int | float) and value >= 0):
            return f"has no number for {name}"
    return ""


def _validates(event: Mapping[str, Any]) -> bool:
    """Whether it is of rows that nothing is trained on, whose groups are called like `val:u17`."""
    return any(":" in row for row in event["rows"][:1])


def _of(line: Mapping[str, Any], name: str) -> float:
    """A metric; NaN where the step does not have it."""
    value = line.get(name)
    return float("nan") if value is None else float(value)


def measured(log: Log, plan: Plan, name: str, guess: Costs) -> Costs:
    """The costs of a plan, as a run of this name took them; a guess for nodes that it did not have.

    Raises `BadRun` where it had none of them.
    """
    group, decoding = dict(guess.group_seconds), dict(guess.decoding)
    syncs, missing = dict(guess.sync_seconds), list[str]()
    for node in plan.graph.nodes.values():
        events = log.of(node.name)
        if not events:
            missing.append(node.name)
        elif node.weights == "generates":
            decoding[node.name] = _decoding(log, events, decoding[node.name], plan.gate)
        elif node.weights == "syncs":
            syncs[node.name] = median(event["end"] - event["start"] for event in events)
        else:
            group[node.name] = _group_seconds(log, events)
    if len(missing) == len(plan.graph.nodes):
        raise BadRun(f"{name} ran none of these nodes: {', '.join(missing)}; it is of another pipeline")
    engine = [line[ENGINE] for line in log.metrics.values() if line.get(ENGINE) is not None]
    kept = [line[KEPT] for line in log.metrics.values() if line.get(KEPT) is not None]
    steps = f"{len(log.metrics)} steps" if len(log.metrics) > 1 else "1 step"
    return Costs(
        source=f"measured in {steps} of {name}",
        group_seconds=group,
        decoding=decoding,
        sync_seconds=syncs,
        call_seconds=median(engine) / len(plan.graph.levels) if engine else guess.call_seconds,
        kept=_kept(log, plan, kept) if kept and plan.gate is not None else guess.kept,
        notes=tuple(_notes(log, plan, missing)),
    )


def _notes(log: Log, plan: Plan, missing: Sequence[str]) -> Iterator[str]:
    if missing:
        yield f"{', '.join(missing)}: not in that run, so estimated"
    if other := list(_otherwise(log.document, plan)):
        yield f"measured with other settings, which may cost something else: {', '.join(other)}"


def _otherwise(then: Document, plan: Plan) -> Iterator[str]:
    """What costs of groups depend on and was not the same: settings of nodes, their models, the size of a group."""
    if then.batch.group != plan.document.batch.group:
        yield f"batch.group ({then.batch.group})"
    for name, spec in then.models.items():
        mine = plan.document.models.get(name)
        if mine is not None and Path(spec.path).name != Path(mine.path).name:
            yield f"models.{name}.path ({spec.path})"
    for name, node in plan.graph.nodes.items():
        if name in then.nodes and node.node is not None:
            settings, old = node.node.model_dump(mode="json"), then.nodes[name].params
            yield from (f"{name}.{key}" for key in settings if key in old and _given(old[key]) != _given(settings[key]))


def _given(value: Any) -> Any:
    """A setting without what is null in it, which a document leaves out."""
    return {key: _given(one) for key, one in value.items() if one is not None} if isinstance(value, dict) else value


def _kept(log: Log, plan: Plan, kept: Sequence[float]) -> float:
    assert plan.gate is not None, "asked only behind a gate"
    tried = sum(len(_uids(event)) for event in log.of(plan.gate.name))
    return min(1.0, sum(kept) / tried) if tried else 1.0


def _uids(event: Mapping[str, Any]) -> set[str]:
    """The groups of an event's rows, which are shown as `u17_0_0`; of those of prompts, none."""
    return {row.rsplit("_", 2)[0] for row in event["rows"]}


def _group_seconds(log: Log, events: Iterable[Mapping[str, Any]]) -> float:
    """Of a group on one worker: the time of all workers over the groups, in the median of the steps."""
    seconds, groups = defaultdict[int, float](float), defaultdict[int, set[str]](set)
    for event in events:
        seconds[event["step"]] += event["end"] - event["start"]
        groups[event["step"]] |= _uids(event)
    return median(seconds[step] / (len(groups[step]) or log.groups) for step in seconds)


@dataclass(frozen=True)
class _Call:
    """What one worker generated at a time."""

    ends: Sequence[float]
    """Of each group, in seconds since they all began, in order."""
    tokens: float
    longest: float
    """Tokens of the longest response; NaN where the run does not say: it counts a step's, so of the rounds of a gate
    only the first and largest one is known."""


def _decoding(log: Log, events: Sequence[Mapping[str, Any]], guess: Decoding, gate: BoundNode | None) -> Decoding:
    """The speed of generation from its whole calls, and how many decoding steps each group took at that speed."""
    calls = list(_calls(log, events, gate))
    if not calls:
        raise BadRun("its rollouts have left no trajectory")
    step_seconds, sequence_seconds = _speed(calls)
    responses = [each for call in calls for each in _responses(call, step_seconds, sequence_seconds, log)]
    return replace(
        guess, lengths=Observed(tuple(responses)), step_seconds=step_seconds, sequence_seconds=sequence_seconds,
        prefix_seconds=0.0, max_groups=float("inf"),
    )  # fmt: skip


def _calls(log: Log, events: Sequence[Mapping[str, Any]], gate: BoundNode | None) -> Iterator[_Call]:
    blocks: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: float(event["end"])):
        blocks[event["step"], event["worker"]].append(event)
    num_groups = {step: sum(len(_uids(e)) for e in events if e["step"] == step) for step, _ in blocks}
    decided = {(e["step"], uid): e["end"] for e in log.of(gate.name) for uid in _uids(e)} if gate is not None else {}
    for (step, _), found in blocks.items():
        tokens = _of(log.metrics[step], TOKENS) / max(1, num_groups[step])
        for number, call in enumerate(_rounds(found, decided)):
            longest = _of(log.metrics[step], LONGEST) if number == 0 else float("nan")
            start = call[0]["start"]
            ends = [event["end"] - start for event in call for _ in _uids(event)]
            if ends:
                yield _Call(ends, tokens * len(ends), longest)


def _rounds(
    blocks: Sequence[Mapping[str, Any]], decided: Mapping[tuple[int, str], float]
) -> list[list[Mapping[str, Any]]]:
    """The blocks of a worker in a step, by round: the next one begins when the gate has decided on all groups so far.

    `decided` says when that was, by step and group; without a gate all blocks are of one round.
    """
    found, ready = [[*blocks[:1]]], 0.0
    for before, block in pairwise(blocks):
        ready = max([ready, *(decided.get((block["step"], uid), float("inf")) for uid in _uids(before))])
        if block["start"] >= ready:
            found.append([])
        found[-1].append(block)
    return found


def _speed(calls: Sequence[_Call]) -> tuple[float, float]:
    """Seconds of a decoding step, and of a sequence in it.

    A call whose longest response has L tokens, and all of them together N, makes L steps: it takes L times the one and
    N times the other. Where the run does not tell, a step is a second.
    """
    told = [call for call in calls if np.isfinite(call.longest + call.tokens)]
    seconds = np.array([call.ends[-1] for call in told])
    longest, tokens = np.array([call.longest for call in told]), np.array([call.tokens for call in told])
    if not told or not longest.all():
        return 1.0, 0.0
    alone = float(seconds @ longest / (longest @ longest))
    both = np.linalg.lstsq(np.stack([longest, tokens], axis=1), seconds, rcond=None)[0]
    errors = [float(((seconds - fit) ** 2).sum()) for fit in (alone * longest, both[0] * longest + both[1] * tokens)]
    exact = errors[0] <= EXACT * float(seconds @ seconds)  # as where every call has as many tokens as the others
    if exact or min(both) < 0 or errors[1] > BETTER * errors[0]:
        return alone, 0.0
    return float(both[0]), float(both[1])


def _responses(call: _Call, step_seconds: float, sequence_seconds: float, log: Log) -> Iterator[Response]:
    """The steps that each group took, if all have the same number of sequences at a time until they end."""
    ends, group = np.array(call.ends), log.document.batch.group
    lasted = np.diff(ends, prepend=0.0)
    others = np.arange(len(ends), 0, -1)
    width = float(group)
    most = group if sequence_seconds else float("inf")  # more would slow down others
    for _ in range(20):  # as many sequences as make the tokens that there are
        steps = np.cumsum(lasted / (step_seconds + sequence_seconds * width * others))
        if np.isfinite(call.tokens):
            width = min(most, (width * call.tokens / max(float(steps.sum()), 1e-12)) ** 0.5)
    yield from (Response(max(float(each), 1e-6), width) for each in steps)
