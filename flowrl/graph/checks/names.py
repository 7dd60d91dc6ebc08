"""Checks of names: models, prompt columns, pools, trackers (FR007, FR010, FR012, FR019, FR022, FR053), runs (FR080)."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.data.values import PROMPT
from flowrl.errors import Problem, Severity, nearest
from flowrl.graph.bind import CPU_POOL
from flowrl.graph.build import DATA
from flowrl.graph.subject import Subject
from flowrl.model import ModelSpec
from flowrl.model_files import (
    MODEL_FILES,
    TOKENIZER_FILES,
    Fault,
    causal_fault,
    content_fault,
    fault_of,
    is_local,
    template_fault,
    tokenizer_fault,
)
from flowrl.run_files import known_runs, named_run
from flowrl.spec.tracking import NoTracking
from flowrl.value_files import value_fault

OTHER_TIMES = frozenset({"step", "engine"})
"""What is timed beside the nodes."""


def model_folder(subject: Subject) -> Iterator[Problem]:
    """FR010: folders and files of models must be there; other names may be hub ids."""
    told: set[tuple[str, str]] = set()
    for name, model in subject.document.models.items():
        named = {"path": (model.path, MODEL_FILES), "tokenizer": (model.tokenizer, TOKENIZER_FILES)}
        faults = {key: fault_of(path, files) for key, (path, files) in named.items() if path is not None}
        faults["path"] = faults["path"] or _use_fault(subject, name, model)
        for key, fault in {**faults, "chat_template": template_fault(model.chat_template)}.items():
            place = subject.place("models", name, key)
            if fault is not None and (str(place), fault.fact) not in told:  # a param that several models take
                told.add((str(place), fault.fact))
                severity: Severity = "warning" if fault.to_be_made else "error"  # of which a run makes an error
                yield Problem("FR010", place, f"models.{name}: {fault.fact}", fault.fix, severity=severity)


def _use_fault(subject: Subject, name: str, model: ModelSpec) -> Fault | None:
    """Why the model in a folder cannot be used as the nodes would; a reward model, for one, need not be causal."""
    if fault := content_fault(model.path):
        return fault
    roles = {node.weights for node in subject.nodes if node.model == name}
    beside = any(name in node.also_reads.values() for node in subject.nodes)
    if model.head == "value":
        return value_fault(model.path, model.trainable or "updates" in roles)  # else FR024
    if (beside or roles & {"generates", "updates"}) and (fault := causal_fault(model.path)):
        return fault
    return tokenizer_fault(model.path) if "generates" in roles and model.tokenizer is None else None


def revision_of_a_folder(subject: Subject) -> Iterator[Problem]:
    """FR007: only the hub has revisions."""
    for name, model in subject.document.models.items():
        if model.revision is not None and is_local(model.path) and fault_of(model.path) is None:
            yield Problem("FR007", subject.place("models", name, "revision"),
                          f"models.{name}: revision '{model.revision}' is asked for, but '{model.path}' is on this "
                          "machine, where it has one", "remove `revision:`, or give a hub id")  # fmt: skip


def reserved_name(subject: Subject) -> Iterator[Problem]:
    """FR007: `data` is what the training data is called in the graph, and two names of metrics are the engine's."""
    for name in sorted(OTHER_TIMES & subject.bound.nodes.keys()):
        yield Problem("FR007", subject.place("nodes", name, key=True),
                      f"nodes.{name}: its time would be the metric time/{name}, which is that of the "
                      f"{'whole step' if name == 'step' else 'engine'}", "another name")  # fmt: skip
    if DATA in subject.bound.nodes:
        yield Problem("FR007", subject.place("nodes", DATA, key=True),
                      f"nodes.{DATA}: '{DATA}' is the training data, which no node can be", "another name")  # fmt: skip


def unknown_model(subject: Subject) -> Iterator[Problem]:
    """FR010: a node's model is one of those under `models:`."""
    known = subject.names("models")
    if subject.reading.is_broken(("models",)):
        return
    for node in subject.nodes:
        named = {**node.also_reads} if node.model is None else {"model": node.model, **node.also_reads}
        for key, model in named.items():
            if model not in known:
                yield Problem("FR010", subject.place_of(node, key),
                              f"nodes.{node.name} uses model '{model}', which is not under models:",
                              nearest(model, subject.document.models)
                              or f"models: {{{model}: {{path: ...}}}}")  # fmt: skip


def needless_or_missing_model(subject: Subject) -> Iterator[Problem]:
    """FR019: a node that works on weights names a model, and no other does."""
    for node in subject.nodes:
        path = ("nodes", node.name)
        if node.weights is not None and node.model is None and not subject.reading.is_broken((*path, "model")):
            yield Problem("FR019", subject.place(*path, key=True),
                          f"nodes.{node.name} ({node.use}) works on a model but names none",
                          f"model: {next(iter(subject.document.models), 'NAME')}")  # fmt: skip
        if node.weights is None and node.model is not None:
            yield Problem("FR019", subject.place(*path, "model", key=True),
                          f"nodes.{node.name} ({node.use}) works on no model", "remove `model:`")  # fmt: skip


def unknown_pool(subject: Subject) -> Iterator[Problem]:
    """FR012: a node's pool is one of those under `pools:`, or the built-in one."""
    known = {CPU_POOL, *subject.names("pools")}
    if subject.reading.is_broken(("pools",)):
        return
    for node in subject.nodes:
        if node.spec.pool is not None and node.spec.pool not in known and node.weights != "syncs":
            add = "" if len(known) > 1 else f"pools: {{{node.spec.pool}: {{workers: 1}}}}"
            yield Problem("FR012", subject.place("nodes", node.name, "pool"),
                          f"nodes.{node.name} runs on pool '{node.spec.pool}', which is not under pools:",
                          add or nearest(node.spec.pool, known))  # fmt: skip


def sync_with_a_pool(subject: Subject) -> Iterator[Problem]:
    """FR053: where a weight sync runs follows from its model."""
    for node in subject.nodes:
        if node.spec.pool is not None and node.weights == "syncs":
            yield Problem("FR053", subject.place("nodes", node.name, "pool", key=True),
                          f"nodes.{node.name} takes no pool: a weight sync spans the pool of the update and every pool "
                          "that generates with the model", "remove `pool:`")  # fmt: skip


def prompts_that_are_no_text(subject: Subject) -> Iterator[Problem]:
    """FR022: a rollout takes any JSON, but a number is no prompt."""
    for node in subject.nodes:
        for field in node.reads.get(PROMPT, ()) if node.weights == "generates" else ():
            column = subject.columns.get(field)
            if column is not None and column.dtype not in ("str", "json"):
                renamed = PROMPT in node.spec.reads
                where = ("nodes", node.name, "reads", PROMPT) if renamed else ("data", "train", "type")
                yield Problem("FR022", subject.place(*where),
                              f"nodes.{node.name} reads the column '{field}' as prompts, which are text or chat "
                              f"messages, but it is {column}", f"write '{field}' as text in the data, or "
                              f"reads: {{{PROMPT}: another column}}")  # fmt: skip


def failure_policy(subject: Subject) -> Iterator[Problem]:
    """FR007: what `on_error` asks for must be possible for this kind of node."""
    for node in subject.nodes:
        asked = node.spec.on_error
        allowed = {"fail"} | ({"unscored"} if node.cls.scores_rows() else set())
        allowed |= {"drop"} if node.cls.scores_alone("drop") else set()
        allowed |= {"drop"} if node.weights == "generates" else set()
        allowed |= {"retry"} if node.cls.pure and node.weights in (None, "generates") else set()
        if asked is not None and asked not in allowed:
            yield Problem("FR007", subject.place("nodes", node.name, "on_error"),
                          f"nodes.{node.name} ({node.use}) cannot have on_error: {asked}",
                          "on_error: " + " | ".join(sorted(allowed)))  # fmt: skip


def unknown_run(subject: Subject) -> Iterator[Problem]:
    """FR080: the run to go on from must be there."""
    checkpoint, root = subject.document.checkpoint, subject.document.run.dir
    if checkpoint is None or checkpoint.resume in ("auto", "never"):
        return
    if named_run(checkpoint.resume, root) is None:
        known = ["auto", "never", *known_runs(root)]
        yield Problem("FR080", subject.place("checkpoint", "resume"), f"there is no run '{checkpoint.resume}'",
                      nearest(checkpoint.resume, known))  # fmt: skip


def repeated_tracker(subject: Subject) -> Iterator[Problem]:
    """FR007: two trackers that write to the same place would write every value twice."""
    found: dict[tuple[str | None, ...], int] = {}
    for position, spec in enumerate(subject.document.tracking):
        if isinstance(spec, NoTracking):
            continue
        first = found.setdefault(spec.target(subject.document.name), position)
        if first != position:
            yield Problem("FR007", subject.reading.place(("tracking", position)),
                          f"tracking[{position}] sends to the same place as tracking[{first}]: every value would be "
                          "there twice", "leave one of them out")  # fmt: skip
