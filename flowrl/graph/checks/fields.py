"""Checks of fields: writers, types, gates and how often nodes run (FR020 to FR022, FR026, FR028, FR029)."""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Place, Problem, nearest
from flowrl.fields import FieldType
from flowrl.graph.bind import BoundNode, raised
from flowrl.graph.build import DATA, upstream
from flowrl.graph.checks.offers import Offers, shown
from flowrl.graph.subject import Subject
from flowrl.graph.words import ordinal


def missing_writer(subject: Subject) -> Iterator[Problem]:
    """FR020: a node reads a field that nothing writes."""
    if subject.bound.unresolved or not subject.columns_known:
        return  # whoever cannot be loaded may be the writer
    known, offers = subject.graph.fields, Offers(subject.graph)
    for node in subject.nodes:
        for port, fields in node.reads.items():
            for field in dict.fromkeys(fields):
                if field not in known and field not in subject.renamed_badly:
                    yield _missing(subject, offers, node, port, field)


def _missing(subject: Subject, offers: Offers, node: BoundNode, port: str, field: str) -> Problem:
    wanted = node.cls.input_ports[port].type
    of_type, close = offers.to(node, wanted), offers.near(node, wanted, field)
    # Columns of data are about anything: a guess would train on the wrong one.
    guess = of_type[0].name if of_type and wanted.axis != "Prompt" else ""
    fix = f"add a node that writes '{field}' ({wanted})"
    if close or guess:
        one_of_many = len(node.reads[port]) > 1
        fix = f"{close or guess} instead of {field}" if one_of_many else f"reads: {{{port}: {close or guess}}}"
    elif wanted.axis == "Prompt":
        fix = f"give the data a column '{field}' ({wanted.dtype}), or reads: {{{port}: COLUMN}}"
    notes = (*shown(of_type), *[f"did you mean '{close}'?"] * bool(close))
    fact = f"nodes.{node.name} reads '{field}', which nothing writes"
    return Problem("FR020", _port_place(subject, node, port, field), fact, fix, notes)


def _port_place(subject: Subject, node: BoundNode, port: str, field: str) -> Place:
    """Where the user named the field, or the node's name."""
    given = node.spec.reads.get(port)
    if given is None:
        return subject.place("nodes", node.name, key=True)
    place = [given.index(field)] if isinstance(given, list) else []
    return subject.reading.place(("nodes", node.name, "reads", port, *place))


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
    offers = Offers(subject.graph)
    for node in subject.nodes:
        for port, fields in node.reads.items():
            wanted = node.cls.input_ports[port].type
            for field in (known[f] for f in fields if f in known):
                if field.type != wanted:
                    fix = f"reads: {{{port}: a field of type {wanted}}}"
                    if field.writer == DATA and wanted.axis == field.type.axis:
                        fix = f"write '{field.name}' as {wanted.dtype} in the data, or {fix}"
                    yield Problem("FR022", _port_place(subject, node, port, field.name),
                                  f"nodes.{node.name} reads '{field.name}' as {wanted}, but {field.writer} writes it "
                                  f"as {field.type}", fix, tuple(shown(offers.to(node, wanted))))  # fmt: skip


def settings_against_fields(subject: Subject) -> Iterator[Problem]:
    """FR026: settings of a node that do not go with what it reads."""
    schedule, known = subject.document.schedule, subject.graph.fields
    prompts = subject.document.batch.prompts // getattr(schedule, "updates_per_sync", 1)
    staleness = getattr(schedule, "max_staleness", 0)
    if subject.bound.unresolved or not subject.renamed_badly <= known.keys():
        return
    wrong = {path[1] for path in subject.bound.broken if path[:1] == ("nodes",) and len(path) > 1}
    offers = Offers(subject.graph)
    for node in subject.nodes:
        if node.node is None or node.name in wrong:
            continue
        unbound = [p for p, port in node.node.active_ports().items() if p not in node.reads and not port.optional]
        if unbound or any(field not in known for field in node.fields_read):
            continue
        try:
            refusal = node.node.refuses(node.reads, prompts, staleness)
        except Exception as error:  # the class may be a user's
            yield raised(node.name, node.cls, error, subject.reading)
            continue
        if refusal:
            yield Problem("FR026", subject.place("nodes", node.name, key=True), f"nodes.{node.name}: {refusal}",
                          notes=tuple(_nearly_read(subject, offers, node)))  # fmt: skip


def _nearly_read(subject: Subject, offers: Offers, node: BoundNode) -> Iterator[str]:
    """Names that the user gave to fields that nobody reads, and that are nearly those of optional ports."""
    for name, port in node.cls.input_ports.items():
        near = offers.near(node, port.type, name) if port.optional and name not in node.reads else ""
        field = subject.graph.fields.get(near)
        if field is None or field.readers or field.writer == DATA:
            continue
        if near in subject.graph.nodes[field.writer].spec.writes.values():
            yield f"nodes.{field.writer} writes '{near}'; did you mean '{name}'?"


KEEP = FieldType("Prompt", "bool")


def gate_misuse(subject: Subject) -> Iterator[Problem]:
    """FR028: a gate writes which groups to keep, there is one, and running again what it depends on can help."""
    right: list[str] = []
    for gate in (node for node in subject.nodes if node.spec.gate is not None):
        fact, fix = _gate_fact(subject, gate)
        if not fact and right:
            fact, fix = f"a second gate beside nodes.{right[0]}; a step has one", "remove one `gate:`"
        if fact:
            yield Problem("FR028", subject.place("nodes", gate.name, "gate"), f"nodes.{gate.name}: {fact}", fix)
        else:
            right.append(gate.name)


def _gate_fact(subject: Subject, gate: BoundNode) -> tuple[str, str]:
    """What is wrong with a gate, and its fix; empty when nothing is."""
    field = gate.spec.gate or ""
    ports = {written: gate.cls.output_ports[port].type for port, written in gate.writes.items()}
    if field not in ports:
        right = [name for name, type_ in ports.items() if type_ == KEEP]
        return f"the gate is '{field}', which the node does not write", (
            f"gate: {right[0]}" if len(right) == 1 else nearest(field, ports) or "remove `gate:`"
        )
    if ports[field] != KEEP:
        return f"the gate '{field}' is {ports[field]}; it must be {KEEP}: one decision for each group", (
            f"gate: a field of type {KEEP}"
        )
    reruns = [subject.graph.nodes[name] for name in sorted(_ancestors(subject, gate))]
    impure = [node.name for node in reruns if not node.cls.pure and node.weights != "generates"]
    if impure:
        return f"it depends on nodes.{impure[0]}, which must not run twice in a step", (
            f"let {gate.name} read only what comes before {impure[0]}"
        )
    read = {field for node in (gate, *reruns) for field in node.fields_read}
    unclear = subject.bound.unresolved or not read <= subject.graph.fields.keys() - subject.doubled.keys()
    if not unclear and not any(node.weights == "generates" for node in reruns):
        return "nothing that it depends on generates: running it again would keep the same groups", (
            "let it read a field that follows from a rollout, or remove `gate:`"
        )
    return "", ""


def _ancestors(subject: Subject, node: BoundNode) -> set[str]:
    """Nodes whose fields this one depends on."""
    sources: dict[str, set[str]] = {}
    for edge in subject.graph.edges:
        if edge.kind == "field" and edge.source != DATA:
            sources.setdefault(edge.target, set()).add(edge.source)
    return upstream(sources, [node.name]) - {node.name}


def uneven_every(subject: Subject) -> Iterator[Problem]:
    """FR029: a node runs only in steps in which what it reads is written, and a sync wherever its update runs."""
    nodes = subject.graph.nodes
    for edge in subject.graph.edges:
        if edge.source == DATA or edge.distance or edge.source == edge.target:
            continue
        writer, reader = nodes[edge.source], nodes[edge.target]
        if edge.kind == "weights" and reader.weights == "syncs":
            if writer.spec.every % reader.spec.every:
                yield Problem("FR029", subject.place("nodes", reader.name, "every"),
                              f"nodes.{reader.name} syncs in every {_nth(reader.spec.every)} step, but "
                              f"nodes.{writer.name} trains in every {_nth(writer.spec.every)}: the rollout would fall "
                              "behind the schedule", f"every: {writer.spec.every}")  # fmt: skip
        elif edge.kind != "weights" and edge.label not in subject.doubled and reader.spec.every % writer.spec.every:
            verb = "reads" if edge.kind == "field" else "waits for"
            own = "every" in reader.spec.model_fields_set
            place = subject.place("nodes", reader.name, *["every"] * own, key=not own)
            yield Problem("FR029", place,
                          f"nodes.{reader.name} {verb} '{edge.label}' in every {_nth(reader.spec.every)} step, but "
                          f"nodes.{writer.name} writes it in every {_nth(writer.spec.every)}",
                          f"nodes.{reader.name}: {{every: {writer.spec.every}}}, or remove `every:` from "
                          f"nodes.{writer.name}")  # fmt: skip


def _nth(number: int) -> str:
    """`2nd` for 2; nothing to add for 1."""
    return "single" if number == 1 else ordinal(number)
