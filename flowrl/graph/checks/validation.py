"""Checks of validation: its data, what runs on it, the names of what it reports (FR011, FR020, FR022, FR026, FR032)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flowrl.errors import Problem, closest
from flowrl.evaluation import Evaluation
from flowrl.fields import FieldType
from flowrl.graph.bind import BoundNode, raised
from flowrl.graph.build import DATA
from flowrl.graph.checks.fields import NUM_COLUMNS
from flowrl.graph.subject import Subject
from flowrl.node import ENGINE_KEYS
from flowrl.spec.validate import repair


def _evaluations(subject: Subject) -> Iterator[tuple[BoundNode, Evaluation]]:
    """Evaluations whose parameters are right."""
    for node in subject.nodes:
        wrong = any(path[:2] == ("nodes", node.name) and len(path) > 2 for path in subject.bound.broken)
        if node.evaluation is not None and not wrong:
            yield node, node.evaluation


def _before(subject: Subject, node: BoundNode) -> list[BoundNode]:
    """What runs for an evaluation, itself included, in the order of declaration."""
    names = subject.graph.leading_to([node.name])
    return [other for other in subject.nodes if other.name in names]


def unknown_dataset(subject: Subject) -> Iterator[Problem]:
    """FR011: the data set of an evaluation is one of those under `data:`."""
    known = subject.names("data")
    for node, evaluation in _evaluations(subject):
        if evaluation.dataset not in known and not subject.reading.is_broken(("data",)):
            others = known - {"train"}
            fix = closest(evaluation.dataset, known) or (sorted(others)[0] if len(others) == 1 else "")
            yield Problem("FR011", subject.place_of(node, "dataset"),
                          f"nodes.{node.name} validates on data set '{evaluation.dataset}', which is not under data:",
                          f"dataset: {fix}" if fix else f"data: {{{evaluation.dataset}: {{type: ...}}}}")  # fmt: skip


def columns_of_validation(subject: Subject) -> Iterator[Problem]:
    """FR020, FR022: validation data has the columns that the nodes read which run on it."""
    told: set[tuple[str, str]] = set()
    for node, evaluation in _evaluations(subject):
        columns = subject.other_columns.get(evaluation.dataset)
        for reader in _before(subject, node) if columns is not None else ():
            for port, fields in reader.reads.items():
                for field in fields:
                    found = subject.graph.fields.get(field)
                    if found is None or found.writer != DATA or (evaluation.dataset, field) in told:
                        continue
                    told.add((evaluation.dataset, field))
                    wanted = reader.cls.input_ports[port].type
                    yield from _column(subject, node, evaluation.dataset, reader, field, wanted)


def _column(
    subject: Subject, node: BoundNode, dataset: str, reader: BoundNode, field: str, wanted: FieldType
) -> Iterator[Problem]:
    """What is wrong with a column of a validation set; nothing where it is as the training data has it."""
    columns, where = subject.other_columns[dataset], f"data.{dataset}"
    who = f"nodes.{reader.name} reads '{field}'" + f", and runs for nodes.{node.name}" * (reader is not node)
    place = subject.place("data", dataset, key=True)
    if field not in columns:
        listed = [f"'{name}' ({type_.dtype})" for name, type_ in columns.items()]
        more = f" and {len(listed) - NUM_COLUMNS} more" if len(listed) > NUM_COLUMNS else ""
        near = closest(field, columns)
        rename = f", such as rename: {{{field}: {near}}}" * bool(near)
        fix = f"give {where} a column '{field}' ({wanted.dtype}){rename}"
        yield Problem("FR020", place, f"{who}, on the rows of {where}, which has no such column", fix,
                      (f"the columns of {where}: {', '.join(listed[:NUM_COLUMNS])}{more}",))  # fmt: skip
    elif not wanted.accepts(columns[field]) and wanted.accepts(subject.columns.get(field, wanted)):
        yield Problem("FR022", place, f"{who} as {wanted}, but {where} has it as {columns[field]}",
                      f"write '{field}' as {wanted.dtype} in {where}")  # fmt: skip


def sampling_of_validation(subject: Subject) -> Iterator[Problem]:
    """FR026: what an evaluation asks of rollouts, they can do."""
    for node, evaluation in _evaluations(subject):
        rollouts = [other for other in _before(subject, node) if other.weights == "generates"]
        for key, value in evaluation.asked().settings:
            wrong = [said for rollout in rollouts if (said := _refusal(subject, rollout, key, value))]
            if not rollouts and not subject.bound.unresolved:
                wrong = ["nothing that it reads follows from a node that generates"]
            for fact in wrong[:1]:
                asks = f"nodes.{node.name} asks for {key} {value:g}"
                yield Problem("FR026", subject.place("nodes", node.name, key), f"{asks}: {fact}", f"remove `{key}:`")


def _refusal(subject: Subject, rollout: BoundNode, key: str, value: Any) -> str:
    """Why a rollout cannot have this value of a setting; empty where it can, or where it is wrong anyway."""
    if rollout.node is None:
        return ""
    if key not in type(rollout.node).model_fields:
        return f"nodes.{rollout.name} ({rollout.use}) has no such setting"
    if key == "temperature" and value == 0:
        return ""  # refused in training, where it cannot be learnt from
    params = {**rollout.spec.params, key: value}
    try:
        _, wrong, _ = repair(rollout.cls, params, subject.reading.place, ("nodes", rollout.name), known=ENGINE_KEYS)
    except Exception as error:  # the class may be a user's
        return raised(rollout.name, rollout.cls, error, subject.reading).fact
    return wrong[0].fact if wrong else ""


def validation_that_trains(subject: Subject) -> Iterator[Problem]:
    """FR032: nothing that runs on validation rows may train, or must not run twice in a step."""
    for node, _ in _evaluations(subject):
        for other in _before(subject, node):
            if other.weights in ("updates", "syncs") or (not other.cls.pure and other.weights != "generates"):
                does = "trains" if other.weights == "updates" else "must not run twice in a step"
                yield Problem("FR032", subject.place("nodes", node.name, key=True),
                              f"nodes.{node.name} would run nodes.{other.name} on validation rows, and that {does}",
                              f"let {node.name} read only what comes before {other.name}")  # fmt: skip
                break


def same_names(subject: Subject) -> Iterator[Problem]:
    """FR032: two evaluations of one data set report under different names."""
    owners: dict[tuple[str, str], str] = {}
    for node, evaluation in _evaluations(subject):
        owner = owners.setdefault((evaluation.dataset, evaluation.prefix), node.name)
        if owner != node.name:
            yield Problem("FR032", subject.place("nodes", node.name, key=True),
                          f"nodes.{node.name} and nodes.{owner} both report {evaluation.prefix}/... of "
                          f"data.{evaluation.dataset}: one would hide the other",
                          f"nodes.{node.name}: {{prefix: {evaluation.prefix}_{node.name}}}")  # fmt: skip
