"""The comparison as text for people, and as data for tools."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from flowrl.graph.plan import Plan
from flowrl.graph.show.text import WIDTH, table, wrapped
from flowrl.graph.words import count
from flowrl.simulate.compare import Comparison
from flowrl.simulate.costs import Costs
from flowrl.simulate.gantt import as_text as gantt
from flowrl.simulate.gantt import chart, letters
from flowrl.simulate.run import Outcome

NONE = "–"


def as_text(found: Comparison, width: int = WIDTH) -> str:
    """The page of `flowrl plan --compare`; its charts are so wide."""
    sections = [
        [f"{found.name}: three schedules, simulated", size_in_words(found)],
        ["costs", *_costs(found.costs)],
        ["schedules", *table(rows(found), right=range(1, len(found.outcomes) + 1))],
        ["splits of separate_async", *table(split_rows(found), right=range(6))],
        *([*_gantt(outcome, width)] for outcome in found.outcomes),
        [*_legend(found.own.plan)],
        [*wrapped(advice(found))],
    ]
    return "\n\n".join("\n".join(lines) for lines in sections)


def size_in_words(found: Comparison) -> str:
    """How much was simulated."""
    batch, warm_up = found.own.plan.document.batch, found.own.warm_up
    size = f"{count(batch.prompts, 'prompt')} × {count(batch.group, 'sample')}"
    left_out = f"; figures leave out the first {count(warm_up, 'step')}" if warm_up else ""
    return f"{count(len(found.own.ends), 'step')} of {size}, seed {found.own.plan.document.run.seed}{left_out}"


def costs_in_words(costs: Costs) -> Iterator[str]:
    """Where the costs are from, and what to know of them."""
    yield f"Costs {costs.source}."
    yield from costs.notes


def _costs(costs: Costs) -> Iterator[str]:
    yield from wrapped(costs.source, 2, 2)
    listed = [(name, f"{seconds_in_words(seconds)} a group") for name, seconds in costs.group_seconds.items()]
    listed += [(name, f"{seconds_in_words(seconds)} a sync") for name, seconds in costs.sync_seconds.items()]
    for name, each in costs.decoding.items():
        speed = " and ".join(f"{_tokens(each.tokens_per_second(num))} with {num}" for num in (1, 64))
        listed.append((name, f"tokens/s of a worker: {speed} sequences; responses {each.lengths}"))
    yield from table(listed)
    for note in costs.notes:
        yield from wrapped(note, 2, 4)


def rows(found: Comparison) -> list[list[str]]:
    """The table of schedules."""
    sync = found.outcomes[0].step_seconds
    pools = list(dict.fromkeys(name for each in found.outcomes for name in each.plan.pools))
    reasons = sorted({reason for each in found.outcomes for reason in each.given_up})

    def row(name: str, cell: Any) -> list[str]:
        return [name, *(cell(each) for each in found.outcomes), ""]

    return [
        row("", lambda each: each.plan.document.schedule.mode),
        row("workers", workers),
        row("prompts in flight", lambda each: f"{each.plan.document.prompts_in_flight:,}"),
        row("step", lambda each: seconds_in_words(each.step_seconds)),
        row("  its median", lambda each: seconds_in_words(each.median_seconds)),
        row("  against sync", lambda each: f"{each.step_seconds / sync:.2f}"),
        row("trained tokens/s", lambda each: _tokens(each.tokens_per_second)),
        row("bubble", lambda each: _percent(each.bubble)),
        *(row(f"idle {name}", lambda each, name=name: _percent(each.idle.get(name))) for name in pools),
        *(
            row(f"staleness {age}", lambda each, age=age: _percent(each.staleness.get(age)))
            for age in sorted({age for each in found.outcomes for age in each.staleness})
        ),
        *(
            row(f"given up: {reason}", lambda each, reason=reason: f"{each.given_up.get(reason, 0):,}")
            for reason in reasons
        ),
    ]


def workers(outcome: Outcome) -> str:
    """Who trains and who generates."""
    team = outcome.team
    return f"{team.workers} shared" if team.shared else f"{team.training} train + {team.rollout} generate"


def split_rows(found: Comparison) -> list[list[str]]:
    """The table of splits."""
    sync = found.outcomes[0].step_seconds
    head = ["train", "generate", "step", "against sync", "tokens/s", "bubble", "", ""]
    return [head] + [
        [
            str(each.team.training), str(each.team.rollout), seconds_in_words(each.step_seconds),
            f"{each.step_seconds / sync:.2f}", _tokens(each.tokens_per_second), _percent(each.bubble),
            "shown above" if each is found.outcomes[-1] else "", "",
        ]
        for each in found.splits
    ]  # fmt: skip


def _gantt(outcome: Outcome, width: int) -> Iterator[str]:
    drawn, names = chart(outcome), letters(outcome.plan)
    steps = count(len(drawn.step_ends), "step")
    yield f"{drawn.title}: {steps} from step {drawn.first_step} on"
    yield from (f"  {line}" for line in gantt(drawn, names, width - 2))
    if drawn.left_out:
        yield f"  and {count(drawn.left_out, 'worker')} more"


def _legend(plan: Plan) -> Iterator[str]:
    legend = "  ".join(f"{letter} {name}" for name, letter in letters(plan).items())
    yield from textwrap.wrap(legend, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)


def advice(found: Comparison) -> str:
    """Which one pays, in a sentence."""
    sync, best = found.outcomes[0], min(found.outcomes, key=lambda each: each.step_seconds)
    ratio = best.step_seconds / sync.step_seconds
    mode = best.plan.document.schedule.mode
    team = sync.team.workers
    more = f" (with {count(best.team.workers, 'worker')} in place of {team})" if best.team.workers > team else ""
    if ratio > 0.95:
        return "No schedule is faster than sync by more than 5 %: stay with it, it trains on nothing stale."
    return f"Fastest: {mode}, {workers(best)}, at {ratio:.2f} of the step of sync{more}."


def as_data(found: Comparison) -> dict[str, Any]:
    """All figures; seconds, and shares between 0 and 1."""
    document = found.own.plan.document
    return {
        "format": 1,
        "name": found.name,
        "steps": len(found.own.ends),
        "warm_up": found.own.warm_up,
        "seed": document.run.seed,
        "costs": _costs_as_data(found.costs),
        "schedules": {each.plan.document.schedule.mode: _outcome_as_data(each) for each in found.outcomes},
        "splits": [_outcome_as_data(each) for each in found.splits],
    }


def _costs_as_data(costs: Costs) -> dict[str, Any]:
    speeds: Mapping[str, Any] = {
        name: {
            "step_seconds": each.step_seconds, "sequence_seconds": each.sequence_seconds,
            "prefix_seconds": each.prefix_seconds, "lengths": str(each.lengths),
        }
        for name, each in costs.decoding.items()
    }  # fmt: skip
    return {
        "source": costs.source, "notes": list(costs.notes), "group_seconds": dict(costs.group_seconds),
        "sync_seconds": dict(costs.sync_seconds), "decoding": speeds, "call_seconds": costs.call_seconds,
        "kept": costs.kept,
    }  # fmt: skip


def _outcome_as_data(each: Outcome) -> dict[str, Any]:
    team = each.team
    return {
        "workers": {"train": team.training, "generate": team.rollout, "shared": team.shared},
        "prompts_in_flight": each.plan.document.prompts_in_flight,
        "step_seconds": each.step_seconds,
        "median_step_seconds": each.median_seconds,
        "tokens_per_second": each.tokens_per_second,
        "bubble": each.bubble,
        "idle": each.idle,
        "staleness": {str(age): share for age, share in each.staleness.items()},
        "given_up": dict(each.given_up),
    }


def seconds_in_words(num: float) -> str:
    """To three digits."""
    if num >= 100:
        return f"{num:,.0f} s"
    return f"{num:.3g} s" if num >= 1 else f"{1000 * num:.3g} ms"


def _tokens(num: float) -> str:
    return f"{num:,.0f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.0f} %"
