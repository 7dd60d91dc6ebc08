"""The checks of a pipeline: one function each, one list, all problems at once.

Causes come before effects: what follows from a problem that is already reported is withheld. The document's own
checks (FR001 to FR018) are in `flowrl.spec`, those of single nodes in `flowrl.graph.bind`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path

from flowrl.errors import Place, Problem, nearest
from flowrl.graph.bind import BoundNode
from flowrl.graph.build import DATA
from flowrl.graph.check_sizes import (
    batch_arithmetic,
    group_of_one,
    model_nodes_need_a_pool,
    pool_shares,
    readers_with_their_update,
)
from flowrl.graph.subject import Check, Subject
from flowrl.registry import shipped_models


def missing_writer(subject: Subject) -> Iterator[Problem]:
    """FR020: a node reads a field that nothing writes."""
    if subject.bound.unresolved or not subject.columns_known:
        return  # whoever cannot be loaded may be the writer
    for node in subject.nodes:
        for port, fields in node.reads.items():
            for field in fields:
                if field not in subject.graph.fields and field not in subject.renamed_badly:
                    yield _missing(subject, node, port, field)


def _missing(subject: Subject, node: BoundNode, port: str, field: str) -> Problem:
    wanted = node.cls.input_ports[port]
    known = subject.graph.fields
    same_type = [f for f in known.values() if f.type == wanted.type and f.writer != node.name]
    close = nearest(field, (f.name for f in same_type))
    notes = [f"'{f.name}' ({f.type}, written by {f.writer}) has the right type" for f in same_type[:4]]
    if close.startswith("did you"):
        notes.append(close)
        best = close.split("'")[1]
    else:
        # Columns of data are about anything: a guess would train on the wrong one.
        best = same_type[0].name if same_type and wanted.type.axis != "Prompt" else ""
    fix = f"reads: {{{port}: {best}}}" if best else f"add a node that writes '{field}' ({wanted.type})"
    if not best and wanted.type.axis == "Prompt":
        fix = f"give the data a column '{field}' ({wanted.type.dtype}), or reads: {{{port}: COLUMN}}"
    return Problem(
        "FR020",
        _port_place(subject, node, port),
        f"nodes.{node.name} reads '{field}', which nothing writes",
        fix,
        tuple(notes),
    )


def _port_place(subject: Subject, node: BoundNode, port: str) -> Place:
    """Where the user renamed the port, or the node's name."""
    if port in node.spec.reads:
        return subject.place("nodes", node.name, "reads", port)
    return subject.place("nodes", node.name, key=True)


def two_writers(subject: Subject) -> Iterator[Problem]:
    """FR021: a field has one writer per step."""
    for field, names in subject.doubled.items():
        for name in names[1:]:
            port = next(p for p, f in subject.graph.nodes[name].writes.items() if f == field)
            first = "the training data" if names[0] == DATA else f"nodes.{names[0]}"
            yield Problem("FR021", subject.place("nodes", name, key=True),
                          f"nodes.{name} writes '{field}', which {first} writes already",
                          f"writes: {{{port}: {field}_{name}}}")  # fmt: skip


def type_mismatch(subject: Subject) -> Iterator[Problem]:
    """FR022: reader and writer disagree on the axis or the type of a field."""
    known = {name: field for name, field in subject.graph.fields.items() if name not in subject.doubled}
    for node in subject.nodes:
        for port, fields in node.reads.items():
            wanted = node.cls.input_ports[port].type
            for field in (known[f] for f in fields if f in known):
                if field.type != wanted:
                    same = [f"'{f.name}' ({f.type}, written by {f.writer}) has the right type"
                            for f in subject.graph.fields.values()
                            if f.type == wanted and f.writer != node.name]  # fmt: skip
                    fix = f"reads: {{{port}: a field of type {wanted}}}"
                    if field.writer == DATA and wanted.axis == field.type.axis:
                        fix = f"write '{field.name}' as {wanted.dtype} in the data, or {fix}"
                    yield Problem("FR022", _port_place(subject, node, port),
                                  f"nodes.{node.name} reads '{field.name}' as {wanted}, but {field.writer} writes it "
                                  f"as {field.type}", fix, tuple(same[:4]))  # fmt: skip


def settings_against_fields(subject: Subject) -> Iterator[Problem]:
    """FR026: settings of a node that do not go with what it reads."""
    prompts = subject.document.batch.prompts // getattr(subject.document.schedule, "updates_per_sync", 1)
    for node in subject.nodes:
        if node.node is None or subject.bound.unresolved:
            continue
        unbound = [p for p, port in node.node.active_ports().items() if p not in node.reads and not port.optional]
        unwritten = [field for field in node.fields_read if field not in subject.graph.fields]
        unwritten += subject.renamed_badly - subject.graph.fields.keys()
        if not unbound and not unwritten:
            refusal = node.node.refuses(node.reads, prompts)
            if refusal:
                yield Problem("FR026", subject.place("nodes", node.name, key=True), f"nodes.{node.name}: {refusal}")


def model_folder(subject: Subject) -> Iterator[Problem]:
    """FR010: a model that is named as a folder must be there; other names may be shipped ones or hub ids."""
    shipped = shipped_models()
    for name, model in subject.document.models.items():
        if model.path not in shipped and difflib.get_close_matches(model.path, shipped, n=1, cutoff=0.85):
            yield Problem("FR010", subject.place("models", name, "path"),
                          f"models.{name}: no shipped model is called '{model.path}'",
                          nearest(model.path, shipped))  # fmt: skip
        if Path(model.path).is_absolute() and not Path(model.path).is_dir():
            yield Problem("FR010", subject.place("models", name, "path"),
                          f"models.{name}: there is no folder '{model.path}'",
                          "path: a shipped name such as arith-tiny, a folder, or a hub id")  # fmt: skip


def weight_roles(subject: Subject) -> Iterator[Problem]:
    """FR023 to FR025 and FR027: who may change a model's weights, and who must hear of it."""
    models = subject.document.models
    # A node of an unknown model or class may be the one that seems to be missing.
    lost = {node.weights for node in subject.nodes if node.model not in models}
    lost |= {"syncs", "updates"} if subject.bound.unresolved else set()
    for name, model in models.items():
        updates, syncs = subject.of_role(name, "updates"), subject.of_role(name, "syncs")
        for update in updates:
            if not model.trainable and not subject.reading.is_broken(("models", name, "trainable")):
                yield Problem("FR024", subject.place("nodes", update.name, "model"),
                              f"nodes.{update.name} updates model '{name}', which is frozen",
                              f"models.{name}: {{trainable: true}}")  # fmt: skip
        for rollout in subject.of_role(name, "generates"):
            if updates and not syncs and "syncs" not in lost:
                yield Problem("FR023", subject.place("nodes", rollout.name, key=True),
                              f"nodes.{rollout.name} generates with model '{name}', which {updates[0].name} trains, "
                              "but no node syncs its weights: it would generate with the first weights for ever",
                              f"weight_sync: {{use: sync.weights, model: {name}}}")  # fmt: skip
        for sync in syncs:
            if not updates and "updates" not in lost:
                yield Problem("FR027", subject.place("nodes", sync.name, key=True),
                              f"nodes.{sync.name} syncs the weights of model '{name}', which no node trains",
                              f"nodes.{sync.name}: null")  # fmt: skip
        for role, found in (("update", updates), ("weight sync", syncs)):
            for extra in found[1:]:
                yield Problem("FR025", subject.place("nodes", extra.name, key=True),
                              f"nodes.{extra.name} is a second {role} of model '{name}' beside nodes.{found[0].name}",
                              "keep one of them, or give each a model of its own")  # fmt: skip


def cycle(subject: Subject) -> Iterator[Problem]:
    """FR040: nodes that wait for each other."""
    for path in subject.graph.cycles():
        if any(edge.kind == "field" and edge.label in subject.doubled for edge in path):
            continue  # which of the writers is meant decides whether there is a cycle
        steps = " ".join(
            f"{edge.source} -[{edge.label if edge.kind == 'field' else f'weights of {edge.label}'}]->" for edge in path
        )
        yield Problem("FR040", subject.place("nodes", path[0].source, key=True),
                      f"these nodes wait for each other: {steps} {path[0].source}",
                      f"let {path[0].source} read a field that does not depend on {path[-1].source}")  # fmt: skip


def needless(subject: Subject) -> Iterator[Problem]:
    """FR030: warnings for nodes that nobody needs, and for models, data sets and pools that nobody uses."""
    for node in subject.nodes:
        if node.weights in ("updates", "syncs") or not node.writes:
            continue
        if not any(subject.graph.fields[f].readers for f in node.writes.values() if f in subject.graph.fields):
            written = ", ".join(f"'{field}'" for field in node.writes.values())
            yield Problem("FR030", subject.place("nodes", node.name, key=True),
                          f"nobody reads what nodes.{node.name} writes ({written}): it is wasted work",
                          f"nodes.{node.name}: null", severity="warning")  # fmt: skip
    for name in subject.document.models:
        if not any(node.model == name for node in subject.nodes):
            yield Problem("FR030", subject.place("models", name, key=True), f"no node uses models.{name}",
                          f"models.{name}: null", severity="warning")  # fmt: skip
        elif subject.of_role(name, "syncs") and not subject.of_role(name, "generates"):
            yield Problem("FR030", subject.place("models", name, key=True),
                          f"models.{name} is trained and synced, but no node generates with it: it never sees text of "
                          "its own", f"let the rollout use model: {name}", severity="warning")  # fmt: skip
    document = subject.document
    pools = {node.pool for node in subject.nodes} | {pool.shares for pool in document.pools.values()}
    for section, unused in (("data", set(document.data) - {"train"}), ("pools", set(document.pools) - pools)):
        for name in sorted(unused):
            yield Problem("FR030", subject.place(section, name, key=True), f"no node uses {section}.{name}",
                          f"{section}.{name}: null", severity="warning")  # fmt: skip


def not_available(subject: Subject) -> Iterator[Problem]:
    """FR079: settings that the document knows and this version cannot act on yet; better refused than ignored."""
    if subject.document.schedule.mode != "sync":
        yield Problem("FR079", subject.place("schedule", "mode"),
                      f"schedule '{subject.document.schedule.mode}' is not available yet", "mode: sync")  # fmt: skip
    for node in subject.nodes:
        for key, default in (("every", 1), ("gate", None)):
            if getattr(node.spec, key) != default:
                yield Problem("FR079", subject.place("nodes", node.name, key),
                              f"nodes.{node.name}: '{key}:' is not available yet", f"remove `{key}:`")  # fmt: skip
    for name, pool in subject.document.pools.items():
        if pool.nodes is not None:
            yield Problem("FR079", subject.place("pools", name, "nodes"),
                          f"pools.{name}: 'nodes:' is not available yet; Ray chooses the machines",
                          "remove `nodes:`")  # fmt: skip
    if subject.document.checkpoint is not None:
        yield Problem("FR079", subject.place("checkpoint", key=True),
                      "checkpoints are not available yet: the run will save none", "remove `checkpoint:`",
                      severity="warning")  # fmt: skip


CHECKS: tuple[Check, ...] = (
    missing_writer, two_writers, type_mismatch, settings_against_fields, model_folder, weight_roles, cycle, pool_shares,
    model_nodes_need_a_pool, readers_with_their_update, batch_arithmetic, group_of_one, not_available,
)  # fmt: skip


def check(subject: Subject) -> tuple[Problem, ...]:
    """Every problem of the pipeline, those of the document first, in the order of the file within each kind."""
    found: Sequence[Problem] = [*subject.reading.problems, *subject.bound.problems]
    found = [*found, *(problem for one in CHECKS for problem in one(subject))]
    if not any(problem.severity == "error" for problem in found):
        found = [*found, *needless(subject)]  # an unread field may be the effect of a reported mistake
    return tuple(dict.fromkeys(found))
