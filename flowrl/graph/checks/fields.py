"""Checks of fields: writers, types, gates and how often nodes run (FR020 to FR022, FR026, FR028, FR029)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from flowrl.errors import Place, Problem, nearest
from flowrl.fields import FieldType
from flowrl.graph.bind import BoundNode, raised
from flowrl.graph.build import DATA, Edge, Field, upstream
from flowrl.graph.checks.offers import Offers, library_writers, shown
from flowrl.graph.checks.sizes import cut_evenly
from flowrl.graph.subject import Subject
from flowrl.graph.words import ordinal
from flowrl.node import Node

NUM_COLUMNS = 12
"""Columns of the data that a message names."""


def missing_writer(subject: Subject) -> Iterator[Problem]:
    """FR020: a node reads a field that nothing writes."""
    if subject.bound.unresolved or not subject.columns_known:
        return  # whoever cannot be loaded may be the writer
    every, offers = subject.graph.fields, Offers(subject.graph)
    # Columns that only validation data has are for what runs on no other rows.
    training = {name for name, field in every.items() if field.writer != DATA or name in subject.columns}
    # What nobody writes because an output was given a wrong name, which is reported.
    lost = {port for node in subject.nodes for port, field in node.spec.writes.items() if field in subject.doubled}
    lost |= subject.renamed_badly
    for node in subject.nodes:
        known = every if node.name in subject.graph.only_validated else training
        for port, fields in node.reads.items():
            for field in dict.fromkeys(fields):
                if field not in known and field not in lost:
                    yield _missing(subject, offers, node, port, field)


def _missing(subject: Subject, offers: Offers, node: BoundNode, port: str, field: str) -> Problem:
    wanted = node.cls.input_ports[port].type
    of_type, writers = offers.to(node, wanted), library_writers(field, wanted)
    # Where the user names no field, and a node of the library writes this one, that node is missing: a field that
    # others read is then no slip of its name.
    absent = bool(writers) and port not in node.spec.reads
    close = offers.near(node, wanted, field, unread=absent)
    # Columns of data are about anything: a guess would train on the wrong one.
    by_data = wanted.axis == "Prompt"
    other = close if by_data else close or offers.unread(node, wanted, field if absent else "")
    fix = f"add a node that writes '{field}' ({wanted})" + f", such as {writers}" * bool(writers)
    if other:
        fix = other_field(node, port, field, other)
    elif by_data:
        kind = "str or json" if wanted.dtype == "json" else wanted.dtype
        column = f"give the data a column '{field}' ({kind})"
        fix = f"{column}, or {fix}" if writers else f"{column}, or reads: {{{port}: COLUMN}}"
    notes = (*shown(of_type), *_columns(subject, wanted, of_type), *[f"did you mean '{close}'?"] * bool(close))
    fact = f"nodes.{node.name} reads '{field}', which nothing writes"
    return Problem("FR020", _port_place(subject, node, port, field), fact, fix, notes)


def _columns(subject: Subject, wanted: FieldType, told: Collection[Field]) -> Iterator[str]:
    """What the data gives, where a column of it is missed and not all of them are named already."""
    if wanted.axis == "Prompt" and subject.columns and not subject.columns.keys() <= {field.name for field in told}:
        listed = [f"'{name}' ({type_.dtype})" for name, type_ in subject.columns.items()]
        more = f" and {len(listed) - NUM_COLUMNS} more" if len(listed) > NUM_COLUMNS else ""
        yield f"the columns of the data: {', '.join(listed[:NUM_COLUMNS])}{more}"


def other_field(node: BoundNode, port: str, field: str, better: str) -> str:
    """The fix that reads another field on a port; what a list port reads beside it stays."""
    return f"{better} instead of {field}" if len(node.reads[port]) > 1 else f"reads: {{{port}: {better}}}"


def _port_place(subject: Subject, node: BoundNode, port: str, field: str) -> Place:
    """Where the user named the field, or the node's name."""
    given = node.spec.reads.get(port)
    if given is None:
        return subject.place("nodes", node.name, key=True)
    place = [given.index(field)] if isinstance(given, list) else []
    return subject.reading.place(("nodes", node.name, "reads", port, *place))


def two_writers(subject: Subject) -> Iterator[Problem]:
    """FR021: a field has one writer per step."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for field, names in subject.doubled.items():
        for name in dict.fromkeys(names[1:]):
            node = subject.graph.nodes[name]
            port = [port for port, written in node.writes.items() if written == field][-1]
            # Fields that the class names are one mistake: the same node twice. Each that the user names is its own.
            by_hand = port if port in node.spec.writes else ""
            found.setdefault((names[0], name, by_hand), {})[port] = field
    read = {field for node in subject.nodes for field in node.fields_read}
    taken = {*subject.graph.fields, *(read - {port for _, _, port in found})}  # who reads an output's own name means it
    for (first, name, by_hand), ports in found.items():
        place = ("nodes", name, "writes", by_hand) if by_hand else ("nodes", name)
        listed, writer = ", ".join(f"'{f}'" for f in ports.values()), "the training data"
        new = ", ".join(f"{port}: {_free_name(port, field, name, taken)}" for port, field in ports.items())
        yield Problem("FR021", subject.place(*place, key=not by_hand),
                      f"nodes.{name} writes {listed}, which {writer if first == DATA else f'nodes.{first}'} writes "
                      "already", f"writes: {{{new}}}")  # fmt: skip


def _free_name(port: str, field: str, node: str, taken: set[str]) -> str:
    """A name for an output that no field has, and none will: it is taken from now on."""
    names = [*[port] * (port != field), *[f"{field}_{node}"] * (field != node)]
    numbered = (f"{field}_{number}" for number in range(2, len(taken) + 3))
    name = next(name for name in (*names, *numbered) if name not in taken)
    taken.add(name)
    return name


def type_mismatch(subject: Subject) -> Iterator[Problem]:
    """FR022: reader and writer disagree on the axis or the type of a field."""
    known = {name: field for name, field in subject.graph.fields.items() if name not in subject.doubled}
    offers = Offers(subject.graph)
    for node in subject.nodes:
        for port, fields in node.reads.items():
            wanted = node.cls.input_ports[port].type
            for field in (known[f] for f in fields if f in known):
                if not wanted.accepts(field.type):
                    fix = other_field(node, port, field.name, f"a field of type {wanted}")
                    if field.writer == DATA and wanted.axis == field.type.axis:
                        fix = f"write '{field.name}' as {wanted.dtype} in the data, or {fix}"
                    if field.writer != DATA and port not in node.spec.reads and _is_own(subject, field.writer):
                        fix = f"let {field.writer} write {wanted}{_made_by(field.type, wanted)}, or {fix}"
                    yield Problem("FR022", _port_place(subject, node, port, field.name),
                                  f"nodes.{node.name} reads '{field.name}' as {wanted}, but {field.writer} writes it "
                                  f"as {field.type}", fix, tuple(shown(offers.to(node, wanted))))  # fmt: skip


def _is_own(subject: Subject, node: str) -> bool:
    """Whether the node's class is the user's, who can change it."""
    return ":" in subject.graph.nodes[node].use


def _made_by(type_: FieldType, wanted: FieldType) -> str:
    """How a column of one type becomes one of another, where it may be meant to."""
    spread = {("Sample", "Token"): "per_token", ("Prompt", "Sample"): "per_sample"}
    method = spread.get((type_.axis, wanted.axis)) if type_.dtype == wanted.dtype else None
    return f" (.{method}(...) makes it of {type_})" if method else ""


def settings_against_fields(subject: Subject) -> Iterator[Problem]:
    """FR026: settings of a node that do not go with what it reads."""
    known = subject.graph.fields
    prompts, staleness = subject.document.batch.prompts, subject.document.max_staleness
    if subject.bound.unresolved or not subject.renamed_badly <= known.keys():
        return
    wrong = {path[1] for path in subject.bound.broken if path[:1] == ("nodes",) and len(path) > 1}
    offers = Offers(subject.graph)
    for node in subject.nodes:
        misspelt = not node.spec.reads.keys() <= node.cls.input_ports.keys()  # perhaps the port that is missed
        if node.node is None or node.name in wrong or misspelt or not cut_evenly(subject, node):
            continue
        unbound = [p for p, port in node.cls.input_ports.items() if p not in node.reads and not port.optional]
        if unbound or any(field not in known for field in node.fields_read):
            continue
        try:
            refusal = node.node.refuses(node.reads, prompts, staleness)
            refusal = refusal or node.node.refuses_writers(_writers(subject, node))
        except Exception as error:  # the class may be a user's
            yield raised(node.name, node.cls, error, subject.reading)
            continue
        if refusal:
            yield Problem("FR026", subject.place("nodes", node.name, key=True), f"nodes.{node.name}: {refusal}",
                          notes=tuple(_nearly_read(subject, offers, node)))  # fmt: skip


def _writers(subject: Subject, node: BoundNode) -> dict[str, Node]:
    """Of each port the node that writes the field that it reads, the first of several."""
    writers = {port: subject.graph.fields[fields[0]].writer for port, fields in node.reads.items() if fields}
    found = {port: subject.graph.nodes[name].node for port, name in writers.items() if name in subject.graph.nodes}
    return {port: writer for port, writer in found.items() if writer is not None}


def not_here(subject: Subject) -> Iterator[Problem]:
    """FR031: warning where a setting needs what this machine lacks; the workers may be on another."""
    for node in (one for one in subject.nodes if one.node is not None):
        assert node.node is not None, "the others are left out"
        try:
            lacking = dict(node.node.lacks())
        except Exception as error:  # the class may be a user's
            yield raised(node.name, node.cls, error, subject.reading)
            continue
        for setting, fact in lacking.items():
            yield Problem("FR031", subject.place("nodes", node.name, setting), f"nodes.{node.name}.{setting}: {fact}",
                          severity="warning")  # fmt: skip


def _nearly_read(subject: Subject, offers: Offers, node: BoundNode) -> Iterator[str]:
    """Names that the user gave to fields that nobody reads, and that are nearly those of optional ports."""
    meant: dict[str, list[str]] = {}
    for name, port in node.cls.input_ports.items():
        near = offers.near(node, port.type, name) if port.optional and name not in node.reads else ""
        meant.setdefault(near, []).append(name)
    for near, names in meant.items():
        field = subject.graph.fields.get(near)
        if field is None or field.readers or field.writer == DATA:
            continue
        if near in subject.graph.nodes[field.writer].spec.writes.values():
            yield f"nodes.{field.writer} writes '{near}'; {nearest(near, names)}"


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
    waits: dict[tuple[str, str], list[Edge]] = {}
    for edge in subject.graph.edges:
        if edge.source == DATA or edge.distance or edge.source == edge.target:
            continue
        if edge.target in subject.graph.only_validated:
            continue  # what it reads is written anew, whenever it runs
        writer, reader = nodes[edge.source].spec.every, nodes[edge.target].spec.every
        if edge.kind == "weights" and nodes[edge.target].weights == "syncs":
            if writer % reader:
                yield Problem("FR029", subject.place("nodes", edge.target, "every"),
                              f"nodes.{edge.target} syncs in {_steps(reader)}, but nodes.{edge.source} trains in "
                              f"{_steps(writer)}: the rollout would fall behind the schedule",
                              f"every: {writer}")  # fmt: skip
        elif edge.kind != "weights" and edge.label not in subject.doubled and reader % writer:
            waits.setdefault((edge.source, edge.target), []).append(edge)
    for (source, target), edges in waits.items():
        verb = "reads" if any(edge.kind == "field" for edge in edges) else "waits for"
        listed = ", ".join(f"'{label}'" for label in dict.fromkeys(edge.label for edge in edges))
        writer = nodes[source].spec.every
        yield Problem("FR029", subject.place_of(nodes[target], "every"),
                      f"nodes.{target} {verb} {listed} in {_steps(nodes[target].spec.every)}, but nodes.{source} "
                      f"writes {'it' if ',' not in listed else 'them'} in {_steps(writer)}",
                      f"nodes.{target}: {{every: {writer}}}, or remove `every:` from nodes.{source}")  # fmt: skip


def _steps(every: int) -> str:
    return "every step" if every == 1 else f"every {ordinal(every)} step"
