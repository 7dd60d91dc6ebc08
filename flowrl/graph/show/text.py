"""Numbers, lists and tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from flowrl.gate import limits_of
from flowrl.graph.bind import BoundNode
from flowrl.graph.plan import Plan
from flowrl.graph.words import count, ordinal

WIDTH = 120
"""Columns that a page is made for."""
_WHEN_SHORT = {"fail": "the run fails", "short": "what there is is trained", "skip": "the step trains nothing"}
_NAMES = 40
"""Columns for a list of names in a table."""


def human_bytes(num: float) -> str:
    """Bytes in the unit that gives one to four digits before the point."""
    return _human(num, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def human_flops(num: float) -> str:
    """Floating-point operations, in powers of 1000."""
    return _human(num, 1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def _human(num: float, base: float, units: Sequence[str]) -> str:
    power = 0
    while num >= base and power + 1 < len(units):
        num, power = num / base, power + 1
    decimals = 0 if power == 0 or num >= 100 else 1 if num >= 10 else 2
    return f"{num:,.{decimals}f} {units[power]}"


def gate_in_words(node: BoundNode, num_groups: int) -> str:
    """What a gate does; empty for any other node."""
    if node.spec.gate is None or node.node is None:
        return ""
    limits = limits_of(node.node)
    return (
        f"{node.spec.gate}: runs again with what it depends on until {count(num_groups, 'group')} are kept; after "
        f"{count(limits.max_rounds, 'round')} {_WHEN_SHORT[limits.when_short]}"
    )


def listed(names: Sequence[str]) -> str:
    """As many of the names as a table has room for."""
    text = ", ".join(names)
    if len(text) <= _NAMES or len(names) < 2:
        return text
    kept = len(names) - 1
    while kept > 1 and len(", ".join(names[:kept])) > _NAMES - 12:
        kept -= 1
    return f"{', '.join(names[:kept])} and {len(names) - kept} more"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: int = 2) -> Iterator[str]:
    """Aligned columns; what is too long in the last one goes on below itself."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    start = indent + sum(widths[:-1]) + 2 * (len(widths) - 1)
    for row in rows:
        cells = [f"{cell:>{width}}" if column in right else f"{cell:<{width}}"
                 for column, (cell, width) in enumerate(zip(row[:-1], widths, strict=False))]  # fmt: skip
        first, *rest = textwrap.wrap(row[-1], max(WIDTH - start, 30)) or [""]
        yield (" " * indent + "  ".join([*cells, first])).rstrip()
        yield from (" " * start + line for line in rest)


def wrapped(text: str, indent: int = 0, hanging: int = 0) -> list[str]:
    """Lines of at most the page's width, the first indented by `indent`, the others by `hanging`."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * hanging, break_on_hyphens=False
    )


def when_in_words(plan: Plan, node: BoundNode) -> Iterator[str]:
    """In which steps a node runs, where that is not each, and on which rows, where they are not those of training."""
    if node.evaluation is not None:
        yield f"{node.evaluation.when(node.spec.every)}, on {node.evaluation.on()}"
        others = plan.graph.leading_to([node.name]) - {node.name}
        yield f"runs {', '.join(name for name in plan.graph.order if name in others) or 'nothing else'} on them too"
    elif node.name in plan.graph.only_validated:
        yield "on validation rows only"
    elif node.spec.every > 1:
        yield f"every {ordinal(node.spec.every)} step"
