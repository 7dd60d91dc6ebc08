"""The checks of a pipeline: one function each, one list, all problems at once.

Causes come before effects: what follows from a problem that is already reported is withheld. The document's own
checks (FR001 to FR018) are in `flowrl.spec`, those of single nodes in `flowrl.graph.bind`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from functools import cached_property

from flowrl.errors import Place, Problem, nearest
from flowrl.fields import FieldType
from flowrl.graph.bind import CPU_POOL, Bound, BoundNode
from flowrl.graph.build import DATA, Graph
from flowrl.graph.pools import physical_name
from flowrl.spec.document import Document
from flowrl.spec.read import Reading


@dataclass(frozen=True)
class Subject:
    """What the checks look at."""

    document: Document
    reading: Reading
    bound: Bound
    graph: Graph
    columns: dict[str, FieldType]
    columns_known: bool
    """Whether the data set could be asked for its columns."""

    @property
    def nodes(self) -> list[BoundNode]:
        """All bound nodes, in the order of declaration."""
        return list(self.graph.nodes.values())

    @cached_property
    def doubled(self) -> dict[str, list[str]]:
        """Fields with several writers; what else seems wrong with them may follow from that."""
        writers: dict[str, list[str]] = {name: [DATA] for name in self.columns}
        for node in self.nodes:
            misspelt = not node.spec.writes.keys() <= node.cls.output_ports.keys()
            for port, field in node.writes.items():
                if port in node.spec.writes or not misspelt:
                    writers.setdefault(field, []).append(node.name)
        return {field: names for field, names in writers.items() if len(names) > 1}

    def place(self, *path: str, key: bool = False) -> Place:
        """Where a value stands."""
        return self.reading.place(path, key=key)

    def of_role(self, model: str | None, role: str) -> list[BoundNode]:
        """Nodes that do this with the model's weights."""
        return [node for node in self.nodes if node.model == model and node.weights == role]


Check = Callable[[Subject], Iterator[Problem]]


def missing_writer(subject: Subject) -> Iterator[Problem]:
    """FR020: a node reads a field that nothing writes."""
    if subject.bound.unresolved or not subject.columns_known:
        return  # whoever cannot be loaded may be the writer
    renamed_badly = {field for node in subject.nodes for port, field in node.spec.writes.items()
                     if port not in node.cls.output_ports}  # fmt: skip
    for node in subject.nodes:
        for port, fields in node.reads.items():
            for field in fields:
                if field not in subject.graph.fields and field not in renamed_badly:
                    yield _missing(subject, node, port, field)


def _missing(subject: Subject, node: BoundNode, port: str, field: str) -> Problem:
    wanted = node.cls.input_ports[port]
    known = subject.graph.fields
    same_type = [f for f in known.values() if f.type == wanted.type and f.writer != node.name]
    close = nearest(field, (f.name for f in same_type) if same_type else known)
    notes = [f"'{f.name}' ({f.type}, written by {f.writer}) has the right type" for f in same_type[:4]]
    if close.startswith("did you"):
        notes.append(close)
        best = close.split("'")[1]
    else:
        best = same_type[0].name if same_type else ""
    fix = f"reads: {{{port}: {best}}}" if best else f"add a node that writes '{field}' ({wanted.type})"
    return Problem("FR020", _port_place(subject, node, port), f"nodes.{node.name} reads '{field}', which nothing writes", fix, tuple(notes))


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
                            for f in subject.graph.fields.values() if f.type == wanted and f.writer != node.name]  # fmt: skip
                    yield Problem("FR022", _port_place(subject, node, port),
                                  f"nodes.{node.name} reads '{field.name}' as {wanted}, but {field.writer} writes it "
                                  f"as {field.type}", f"reads: {{{port}: a field of type {wanted}}}", tuple(same[:4]))  # fmt: skip


def settings_against_fields(subject: Subject) -> Iterator[Problem]:
    """FR026: settings of a node that do not go with what it reads."""
    prompts = subject.document.batch.prompts // getattr(subject.document.schedule, "updates_per_sync", 1)
    for node in subject.nodes:
        unwritten = [f for fields in node.reads.values() for f in fields if f not in subject.graph.fields]
        if node.node is not None and not unwritten and not subject.bound.unresolved:
            refusal = node.node.refuses(node.reads, prompts)
            if refusal:
                yield Problem("FR026", subject.place("nodes", node.name, key=True), f"nodes.{node.name}: {refusal}")


def model_folder(subject: Subject) -> Iterator[Problem]:
    """FR010: a model that is named as a folder must be there; other names may be shipped ones or hub ids."""
    for name, model in subject.document.models.items():
        if Path(model.path).is_absolute() and not Path(model.path).is_dir():
            yield Problem("FR010", subject.place("models", name, "path"),
                          f"models.{name}: there is no folder '{model.path}'",
                          "path: a shipped name such as arith-tiny, a folder, or a hub id")  # fmt: skip


def weight_roles(subject: Subject) -> Iterator[Problem]:
    """FR023 to FR025: who may change a model's weights, and who must hear of it."""
    models = subject.document.models
    lost_sync = any(node.weights == "syncs" and node.model not in models for node in subject.nodes)
    for name, model in models.items():
        updates, syncs = subject.of_role(name, "updates"), subject.of_role(name, "syncs")
        for update in updates:
            if not model.trainable and not subject.reading.is_broken(("models", name, "trainable")):
                yield Problem("FR024", subject.place("nodes", update.name, "model"),
                              f"nodes.{update.name} updates model '{name}', which is frozen",
                              f"models.{name}: {{trainable: true}}")  # fmt: skip
        for rollout in subject.of_role(name, "generates"):
            if updates and not syncs and not lost_sync and not subject.bound.unresolved:
                yield Problem("FR023", subject.place("nodes", rollout.name, key=True),
                              f"nodes.{rollout.name} generates with model '{name}', which {updates[0].name} trains, but "
                              "no node syncs its weights: it would generate with the first weights for ever",
                              f"weight_sync: {{use: sync.weights, model: {name}}}")  # fmt: skip
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
    """FR030: warnings for nodes that nobody needs and models that nobody uses."""
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


def pool_shares(subject: Subject) -> Iterator[Problem]:
    """FR012: `shares:` names another pool, and does not run in a circle."""
    pools = subject.document.pools
    for name, pool in pools.items():
        if pool.shares is None:
            continue
        place = subject.place("pools", name, "shares")
        if pool.shares not in pools:
            yield Problem("FR012", place, f"pools.{name} shares the workers of '{pool.shares}', which is not under pools:",
                          nearest(pool.shares, set(pools) - {name}))  # fmt: skip
        elif physical_name(pools, name) is None:
            yield Problem("FR012", place, f"pools.{name} shares workers in a circle", "let one of them have `workers:`")


def model_nodes_need_a_pool(subject: Subject) -> Iterator[Problem]:
    """FR050: a node that holds a model cannot run on the built-in CPU pool."""
    for node in subject.nodes:
        needs_pool = node.cls.device == "accelerator" or node.weights in ("reads", "updates", "generates")
        refused = subject.reading.is_broken(("nodes", node.name, "pool"))
        if needs_pool and node.weights != "syncs" and node.pool == CPU_POOL and not refused:
            pools = [name for name in subject.document.pools if name != CPU_POOL]
            yield Problem("FR050", subject.place("nodes", node.name, key=True),
                          f"nodes.{node.name} ({node.spec.use}) holds a model and needs a pool of its own, but runs on "
                          f"the built-in pool '{CPU_POOL}'", f"pool: {pools[0] if pools else 'NAME'}")  # fmt: skip


def readers_with_their_update(subject: Subject) -> Iterator[Problem]:
    """FR054: training weights live on the pool of the update; nodes that read them run there too."""
    pools = subject.document.pools
    for update in (node for node in subject.nodes if node.weights == "updates"):
        home = physical_name(pools, update.pool)
        for reader in subject.of_role(update.model, "reads"):
            there = physical_name(pools, reader.pool)
            if None not in (home, there) and there != home and CPU_POOL not in (home, there):
                yield Problem("FR054", subject.place("nodes", reader.name, "pool"),
                              f"nodes.{reader.name} reads the weights of '{update.model}' on pool '{reader.pool}', but "
                              f"nodes.{update.name} trains them on pool '{update.pool}'", f"pool: {update.pool}")  # fmt: skip


def batch_arithmetic(subject: Subject) -> Iterator[Problem]:
    """FR060 and FR061: mini-batches divide the batch, and every rank gets a row of each."""
    document = subject.document
    if any(subject.reading.is_broken(("batch", key)) for key in ("prompts", "group")):
        return
    updates_per_sync = getattr(document.schedule, "updates_per_sync", 1)
    prompts = max(1, document.batch.prompts // updates_per_sync)
    for node in subject.nodes:
        minibatch = getattr(node.node, "minibatch", None)
        if node.weights != "updates" or not isinstance(minibatch, int):
            continue
        place = subject.place("nodes", node.name, "minibatch")
        per = f" / {updates_per_sync} updates per sync" if updates_per_sync > 1 else ""
        if document.batch.prompts % updates_per_sync or prompts % minibatch:
            fits = [d for d in range(1, prompts + 1) if prompts % d == 0]
            best = min(fits, key=lambda d: abs(d - minibatch))
            yield Problem("FR060", place, f"nodes.{node.name}: mini-batches of {minibatch} prompts do not divide the "
                          f"batch of {document.batch.prompts} prompts{per}", f"minibatch: {best}")  # fmt: skip
            continue
        pool = document.pools.get(physical_name(document.pools, node.pool) or "")
        rows = minibatch * document.batch.group
        if pool is not None and rows < pool.workers:
            yield Problem("FR061", place, f"nodes.{node.name}: a mini-batch of {minibatch} prompts x "
                          f"{document.batch.group} samples has {rows} rows for {pool.workers} workers: some would have "
                          "none", f"minibatch: at least {-(-pool.workers // document.batch.group)}")  # fmt: skip


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
    if subject.document.checkpoint is not None:
        yield Problem("FR079", subject.place("checkpoint", key=True),
                      "checkpoints are not available yet: the run will save none", "remove `checkpoint:`",
                      severity="warning")  # fmt: skip


CHECKS: tuple[Check, ...] = (
    missing_writer, two_writers, type_mismatch, settings_against_fields, model_folder, weight_roles, cycle, pool_shares, model_nodes_need_a_pool,
    readers_with_their_update, batch_arithmetic, not_available,
)  # fmt: skip


def check(subject: Subject) -> tuple[Problem, ...]:
    """Every problem of the pipeline, those of the document first, in the order of the file within each kind."""
    found: Sequence[Problem] = [*subject.reading.problems, *subject.bound.problems]
    found = [*found, *(problem for one in CHECKS for problem in one(subject))]
    if not any(problem.severity == "error" for problem in found):
        found = [*found, *needless(subject)]  # an unread field may be the effect of a reported mistake
    return tuple(dict.fromkeys(found))
