"""The checks of a pipeline: one function each, one list, all problems at once.

Causes come before effects: what follows from a problem that is already reported is withheld. The document's own
checks (FR001 to FR018) are in `flowrl.spec`; classes, parameters and ports of single nodes (FR005 to FR009, FR013,
FR014) are checked where they are bound, in `flowrl.graph.bind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.errors import Problem
from flowrl.graph.build import Edge
from flowrl.graph.checks import fields, memory, names, readers, schedule, sizes, training, validation, weights
from flowrl.graph.checks.offers import Offers, shown
from flowrl.graph.checks.waste import needless
from flowrl.graph.subject import Check, Subject


def cycle(subject: Subject) -> Iterator[Problem]:
    """FR040: nodes that wait for each other."""
    cycles = subject.graph.cycles()
    gate_is_wrong = bool(cycles) and any(True for _ in fields.gate_misuse(subject))
    for path in cycles:
        if any(edge.kind == "field" and edge.label in subject.doubled for edge in path):
            continue  # which of the writers is meant decides whether there is a cycle
        if gate_is_wrong and any(edge.kind == "gate" for edge in path):
            continue  # a right gate may make nobody in it wait
        steps = " ".join(f"{edge.source} -[{edge.shown}]->" for edge in path)
        fix, notes = _way_out(subject, path)
        yield Problem("FR040", subject.place("nodes", path[0].source, key=True),
                      f"these nodes wait for each other: {steps} {path[0].source}", fix, notes)  # fmt: skip


def _way_out(subject: Subject, path: Sequence[Edge]) -> tuple[str, tuple[str, ...]]:
    """What the first node of a cycle may read in the place of what the last one writes."""
    node, last = subject.graph.nodes[path[0].source], path[-1]
    other = f"does not depend on {last.source}" if last.source != node.name else "another node writes"
    fix = f"let {node.name} read a field that {other}"
    if last.kind != "field":
        return fix, ()
    port = node.port_of(last.label)
    offered = Offers(subject.graph).to(node, port.type)
    if last.source == node.name and offered and port.type.axis != "Prompt":  # nobody means to read what he writes
        fix = fields.other_field(node, port.name, last.label, offered[0].name)
    return fix, tuple(shown(offered))


CHECKS: tuple[Check, ...] = (
    names.reserved_name,
    names.unknown_model,
    names.model_folder,
    names.revision_of_a_folder,
    names.needless_or_missing_model,
    names.unknown_pool,
    names.sync_with_a_pool,
    names.failure_policy,
    training.optimizer,
    training.adapted_layers,
    training.optimizer_without_effect,
    names.unknown_run,
    names.repeated_tracker,
    fields.missing_writer,
    fields.two_writers,
    fields.type_mismatch,
    names.prompts_that_are_no_text,
    fields.settings_against_fields,
    fields.not_here,
    fields.gate_misuse,
    fields.uneven_every,
    validation.unknown_dataset,
    validation.columns_of_validation,
    validation.sampling_of_validation,
    validation.validation_that_trains,
    validation.same_names,
    weights.other_head,
    weights.rollout_without_sync,
    weights.frozen_update,
    weights.second_of_its_kind,
    readers.other_vocabulary,
    readers.trained_beside,
    weights.sync_of_an_untrained_model,
    cycle,
    sizes.pool_shares,
    sizes.model_nodes_need_a_pool,
    sizes.workers_per_machine,
    sizes.copies_fill_their_pool,
    sizes.readers_with_their_update,
    weights.sync_across_pools,
    sizes.empty_minibatch,
    sizes.batches_divide,
    sizes.minibatch_divides,
    sizes.rows_for_every_rank,
    sizes.nothing_to_shuffle,
    sizes.group_of_one,
    memory.does_not_fit,
    schedule.stale_samples,
    schedule.pools_of_the_schedule,
    schedule.keys_without_effect,
    schedule.capacity,
    schedule.other_distribution,
    schedule.not_available,
    schedule.ignored,
)


def check(subject: Subject) -> tuple[Problem, ...]:
    """Every problem of the pipeline, those of the document first, in the order of the file within each kind."""
    found: Sequence[Problem] = [*subject.reading.problems, *subject.bound.problems]
    found = [*found, *(problem for one in CHECKS for problem in one(subject))]
    if not any(problem.severity == "error" for problem in found):
        found = [*found, *needless(subject)]  # an unread field may be the effect of a reported mistake
    return tuple(dict.fromkeys(found))
