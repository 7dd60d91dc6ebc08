"""What every node owes the engine, tried on toy batches: eight properties, each with what breaks it, and a ninth
of nodes that remember something.

A node cannot read a field that `run` does not take; that it reads only what it declares means here that it changes none
of its inputs, which are shared memory in a run, and that it works without the optional ones. The plain batch has no
empty response, no null and no group of one: each of these belongs to a property of its own, so that one fault is told
once.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flowrl.batch import Batch, Token
from flowrl.column import Column
from flowrl.join import concat, take, take_groups
from flowrl.metrics import Report, collect
from flowrl.node import Context, Node
from flowrl.rows import Rows
from flowrl.testing.compare import Values, changed_input, difference, misfit, some, values_of, wrong_rows
from flowrl.testing.faults import Fault, Untried, Verdict, error_of, said
from flowrl.testing.toy import arguments, joined, toy_batch, toy_context

Shape = Mapping[str, Any]
"""Arguments of `toy_batch`."""
PLAIN: Shape = {"group": 3, "lengths": (2, 4, 3, 5), "nulls": 0}
EDGES: Mapping[str, Shape] = {
    "an empty response": {"lengths": (2, 0, 3)},
    "responses of one token": {"lengths": (1,)},
    "no token anywhere": {"lengths": (0,)},
    "masks that are False everywhere": {"masks": False},
    "groups of one": {"group": (1, 1, 1)},
    "a batch of one row": {"group": (1,)},
    "no rows": {"group": (0, 0, 0)},
}
NULLS: Mapping[str, Shape] = {"a null": {"nulls": 1}, "nothing but nulls": {"nulls": 99}}
ORDER = "with the groups in another order"


class Ran(NamedTuple):
    """One run: its blocks as they came, all of them as one, and what the node reported."""

    blocks: list[Any]
    out: Any
    report: Report

    @property
    def members(self) -> list[tuple[Any, ...]]:
        """What each block holds; itself where it is no `Out`."""
        return [block if isinstance(block, tuple) else (block,) for block in self.blocks]


def verdicts(node: Node, *, seed: int = 0, context: Context | None = None) -> list[Verdict]:
    """Every property of a node under its settings; what does not run at all has no other."""
    trial = _Trial(node, seed, context)
    properties = {
        "runs on a plain batch": trial.runs,
        "is deterministic under a seed": trial.repeats,
        "reads only what it declares": trial.leaves_inputs_alone,
        "writes what it declares": trial.writes,
        "keeps identities": trial.keeps_identities,
        "needs no more than its scope": trial.stays_in_scope,
        "survives empty and short rows": trial.survives_edges,
        "survives nulls": trial.survives_nulls,
    }
    if not node.pure and node.weights != "updates":
        properties["goes on from its state"] = trial.goes_on
    for name, prove in properties.items():
        try:
            if trial.holds("runs on a plain batch") is False:
                raise Untried("it does not run")
            prove()
            trial.found[name] = Verdict(name, True)
        except Untried as reason:
            trial.found[name] = Verdict(name, None, str(reason))
        except Fault as fault:
            trial.found[name] = Verdict(name, False, str(fault))
    return list(trial.found.values())


class _Trial:
    """One node on trial. Properties raise `Fault` where they do not hold, `Untried` where they mean nothing."""

    def __init__(self, node: Node, seed: int, context: Context | None) -> None:
        self.node, self.seed, self.context = node, seed, context
        self.found: dict[str, Verdict] = {}
        self.tolerance = 1e-5 if node.weights is None else 1e-4  # padding moves a log-probability in its last bits
        ports = node.active_ports()
        self.optional = tuple(n for n, port in ports.items() if port.optional and not node.needs().get(n, False))
        self.num_fields = 2
        self.num_fields = next((num for num in (2, 1, 3, 4, 5, 6) if not self.refusal(num_fields=num)), 2)

    def holds(self, name: str) -> bool | None:
        """What was found of a property before."""
        return self.found[name].holds if name in self.found else None

    def fresh(self) -> Node:
        """Another instance with the same settings, set up on a worker of its own."""
        node = type(self.node)(**{name: getattr(self.node, name) for name in type(self.node).model_fields})
        context = self.context or toy_context(node, self.seed)
        node.setup(Context(**{**vars(context), "shared": {}}))
        return node

    def forgetful(self) -> Node:
        """One whose next run is to be compared with the first of another: it remembers nothing."""
        return self.first if self.node.pure else self.fresh()

    def memory(self) -> str:
        """What to say of a node that gives something else when it is given the same batch again."""
        again = self.run(self.forgetful(), self.batch())
        forgot = not difference(values_of(self.node, self.plain.out), values_of(self.node, again.out), self.tolerance)
        return "" if forgot else "\nso it does with the same batch again: a node that remembers says `pure = False`"

    def batch(self, shape: Shape = PLAIN) -> Batch:
        """A new batch, whatever a node may have done to the last one."""
        return toy_batch(self.node, seed=self.seed, num_fields=self.num_fields, **{**PLAIN, **shape})

    def refusal(self, absent: Sequence[str] = (), num_prompts: int = 3, num_fields: int | None = None) -> str:
        """Why the check would refuse these fields before launch; empty if it would not."""
        num = num_fields or self.num_fields
        ports = {name: port for name, port in self.node.active_ports().items() if name not in absent}
        reads = {n: tuple(f"{n}.{i}" for i in range(num)) if p.many else (n,) for n, p in ports.items()}
        return self.node.refuses(reads, num_prompts)

    def run(self, node: Node, batch: Batch, where: str = "", absent: Sequence[str] = ()) -> Ran:
        """Raises `Fault` with the error, its line and its rows."""
        with collect() as report:
            try:
                result = node.run(**arguments(node, batch, absent))  # type: ignore[attr-defined]
                blocks = list(result) if isinstance(result, Iterator) else [result]
            except (Exception, SystemExit) as error:
                rows = some(self.culprits(node, batch, absent) or batch.rows.names() or batch.rows.uids)
                raise Fault(said(where, f"{error_of(type(node), error)}\nrows {rows}")) from error
        try:
            return Ran(blocks, joined(node, blocks), report)
        except Exception as error:
            raise Fault(said(where, f"the blocks that it yields do not fit together: {error}")) from error

    def culprits(self, node: Node, batch: Batch, absent: Sequence[str]) -> list[str]:
        """The rows or groups that fail by themselves."""
        found: list[str] = []
        for piece in self.pieces(batch):
            try:
                result = node.run(**arguments(node, piece, absent))  # type: ignore[attr-defined]
                list(result if isinstance(result, Iterator) else ())
            except (Exception, SystemExit):
                found += piece.rows.names() or piece.rows.uids
        return found

    def pieces(self, batch: Batch) -> Iterable[Batch]:
        """The smallest batches that the node's scope allows: single rows, single groups, or none."""
        if self.node.scope == "sample" and len(batch.rows):
            return [take(batch, np.array([row])) for row in range(len(batch.rows))]
        groups = batch.rows.uids if self.node.scope in ("sample", "group") else ()
        return [take_groups(batch, [uid]) for uid in groups]

    def runs(self) -> None:
        """On a plain batch, with every input that its settings may read."""
        if refusal := self.refusal():
            raise Fault(f"its settings refuse the batch: {refusal}")
        try:
            self.first, self.second = self.fresh(), self.fresh()
        except Exception as error:
            raise Fault(said("setup", error_of(type(self.node), error))) from error
        self.plain = self.run(self.first, self.batch())
        for failed in self.plain.report.failures:
            raise Fault(f"it reports a failure: {failed.error}\nrows {some(failed.rows)}")

    def repeats(self) -> None:
        """Two fresh instances give the same outputs and metrics, bit for bit, twice in a row."""
        first = [self.plain, self.run(self.first, self.batch())]
        for nth, one in zip(("first", "second"), first, strict=True):
            if found := self.differ(one, self.run(self.second, self.batch())):
                raise Fault(f"two fresh instances differ in their {nth} run: {found}")

    def differ(self, one: Ran, two: Ran) -> str:
        """The first difference in outputs, or else in metrics, to the last bit; empty if there is none."""
        found = difference(values_of(self.node, one.out), values_of(self.node, two.out))
        return found or difference(_metrics(one.report), _metrics(two.report))

    def goes_on(self) -> None:
        """Another instance that loads what it saved after a run goes on as it does itself."""
        node, other = self.fresh(), self.fresh()
        self.run(node, self.batch())
        try:
            if saved := node.state():
                other.load_state(pickle.loads(pickle.dumps(saved)))
        except Exception as error:
            raise Fault(said("state", error_of(type(node), error))) from error
        if found := self.differ(self.run(node, self.batch()), self.run(other, self.batch())):
            raise Fault(f"after a run, itself and another that loaded its state differ in their next: {found}")

    def leaves_inputs_alone(self) -> None:
        """Inputs stay as they are, and the optional ones may be absent."""
        for absent in dict.fromkeys(((), self.optional)):
            where = f"without {', '.join(absent)}" if absent else ""
            if self.refusal(absent):
                continue
            batch = self.batch()
            before = copy.deepcopy(batch.columns)
            self.run(self.first, batch, where, absent)
            if changed := changed_input(before, batch):
                raise Fault(said(where, f"it changes its input {changed}; inputs are read-only in a run"))

    def writes(self) -> None:
        """Names, axes, types and lengths as `Out` says; finite where nothing may be missing."""
        if not self.node.output_ports:
            if self.plain.out is not None:
                raise Fault(f"it returns {type(self.plain.out).__name__}, but has no `Out`")
            raise Untried("it writes nothing")
        self.check_out(self.plain, self.batch())

    def check_out(self, ran: Ran, batch: Batch, where: str = "") -> None:
        """Every block is what `Out` declares."""
        new = int(self.node.cardinality == "expands")
        lengths = [column.lengths for column in batch.columns.values() if isinstance(column, Token)]
        for block in ran.blocks:
            if not isinstance(block, tuple) or len(block) != len(self.node.output_ports) + new:
                raise Fault(said(where, f"it returns {type(block).__name__}, not its Out"))
            for port, column in zip(self.node.output_ports.values(), block[new:], strict=True):
                if fault := misfit(port, column):
                    raise Fault(said(where, f"'{port.name}' {fault}"))
                keeps = self.node.cardinality == "keeps" and isinstance(column, Token) and lengths
                if keeps and column.rows == batch.rows and not np.array_equal(column.lengths, lengths[0]):
                    raise Fault(said(where, f"'{port.name}' has other lengths than the tokens that it reads"))

    def keeps_identities(self) -> None:
        """The rows that were given, a part of them, or new ones; the order of groups means nothing."""
        if not self.node.output_ports:
            raise Untried("it writes no rows")
        if not all(isinstance(value, Column | Rows) for block in self.plain.members for value in block):
            raise Untried("what it writes has no rows")
        batch = self.batch()
        self.check_rows(self.plain, batch.rows)
        turned = concat([take_groups(batch, [uid]) for uid in reversed(batch.rows.uids)])
        ran = self.run(self.forgetful(), turned, ORDER)
        self.check_rows(ran, turned.rows, ORDER)
        if self.node.scope in ("batch", "step") and self.holds("is deterministic under a seed"):
            found = difference(values_of(self.node, self.plain.out), values_of(self.node, ran.out), self.tolerance)
            if found:
                raise Fault(f"{ORDER}, {found}{self.memory()}")

    def check_rows(self, ran: Ran, given: Rows, where: str = "") -> None:
        """The rows written are those that the node's cardinality promises, in the order in which they came."""
        written = [[value if isinstance(value, Rows) else value.rows for value in block] for block in ran.members]
        if fault := wrong_rows(self.node.cardinality, written, given):
            raise Fault(said(where, fault))

    def stays_in_scope(self) -> None:
        """A row, or a group, gives by itself what it gives in the batch."""
        batch = self.batch()
        pieces = list(self.pieces(batch))
        if not pieces or not self.node.output_ports:
            raise Untried("it takes the whole batch" if not pieces else "it writes nothing")
        if not self.holds("is deterministic under a seed"):
            raise Untried("it is not deterministic")
        what = "row" if len(pieces) == len(batch.rows) else "group"
        whole = values_of(self.node, self.plain.out)
        for piece in pieces:
            alone = values_of(self.node, self.run(self.forgetful(), piece, f"with one {what} alone").out)
            found = difference({key: whole.get(key, "absent") for key in alone}, alone, self.tolerance)
            if found:
                where = f"in the batch, and with its {what} alone (its scope is '{self.node.scope}')"
                raise Fault(f"{found}: {where}{self.memory()}")

    def survives_edges(self) -> None:
        """Empty and short responses, empty masks, groups of one, a single row, and where it can occur none."""
        for what, shape in EDGES.items():
            if what != "no rows" or self.node.weights == "updates":
                self.survives(f"with {what}", self.batch(shape))

    def survives_nulls(self) -> None:
        """Missing values, one of them or all."""
        if not any(port.type.nullable for port in self.node.active_ports().values()):
            raise Untried("none of its inputs can be null")
        for what, shape in NULLS.items():
            self.survives(f"with {what}", self.batch(shape))

    def survives(self, where: str, batch: Batch) -> None:
        """It runs, and still writes what it should, so far as it does on a plain batch."""
        if self.refusal(num_prompts=batch.rows.num_groups):
            return
        ran = self.run(self.first, batch, where)
        if self.holds("writes what it declares"):
            self.check_out(ran, batch, where)
        if self.holds("keeps identities"):
            self.check_rows(ran, batch.rows, where)


def _metrics(report: Report) -> Values:
    return {("metric", name): metric.value for name, metric in report.metrics.items()}
