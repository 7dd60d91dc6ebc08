"""The checks of a pipeline: one function each, one list, all problems at once.

Causes come before effects: what follows from a problem that is already reported is withheld. The document's own
checks (FR001 to FR018) are in `flowrl.spec`; classes, parameters and ports of single nodes (FR005 to FR009, FR013,
FR014) are checked where they are bound, in `flowrl.graph.bind`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.errors import Problem
from flowrl.graph import check_fields, check_memory, check_names, check_schedule, check_sizes, check_weights
from flowrl.graph.check_waste import needless
from flowrl.graph.subject import Check, Subject


def cycle(subject: Subject) -> Iterator[Problem]:
    """FR040: nodes that wait for each other."""
    for path in subject.graph.cycles():
        if any(edge.kind == "field" and edge.label in subject.doubled for edge in path):
            continue  # which of the writers is meant decides whether there is a cycle
        steps = " ".join(f"{edge.source} -[{edge.shown}]->" for edge in path)
        yield Problem("FR040", subject.place("nodes", path[0].source, key=True),
                      f"these nodes wait for each other: {steps} {path[0].source}",
                      f"let {path[0].source} read a field that does not depend on {path[-1].source}")  # fmt: skip


CHECKS: tuple[Check, ...] = (
    check_names.reserved_name,
    check_names.unknown_model,
    check_names.model_folder,
    check_names.needless_or_missing_model,
    check_names.unknown_pool,
    check_names.sync_with_a_pool,
    check_names.failure_policy,
    check_fields.missing_writer,
    check_fields.two_writers,
    check_fields.type_mismatch,
    check_fields.settings_against_fields,
    check_fields.gate_misuse,
    check_fields.uneven_every,
    check_weights.rollout_without_sync,
    check_weights.frozen_update,
    check_weights.second_of_its_kind,
    check_weights.sync_of_an_untrained_model,
    cycle,
    check_sizes.pool_shares,
    check_sizes.model_nodes_need_a_pool,
    check_sizes.workers_per_machine,
    check_sizes.readers_with_their_update,
    check_sizes.minibatch_divides,
    check_sizes.rows_for_every_rank,
    check_sizes.group_of_one,
    check_memory.does_not_fit,
    check_schedule.stale_samples,
    check_schedule.pools_of_the_schedule,
    check_schedule.keys_without_effect,
    check_schedule.capacity,
    check_schedule.other_distribution,
    check_schedule.ignored,
    check_schedule.not_available,
)


def check(subject: Subject) -> tuple[Problem, ...]:
    """Every problem of the pipeline, those of the document first, in the order of the file within each kind."""
    found: Sequence[Problem] = [*subject.reading.problems, *subject.bound.problems]
    found = [*found, *(problem for one in CHECKS for problem in one(subject))]
    if not any(problem.severity == "error" for problem in found):
        found = [*found, *needless(subject)]  # an unread field may be the effect of a reported mistake
    return tuple(dict.fromkeys(found))
