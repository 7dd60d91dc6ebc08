"""What a person sees of a validation: a line when it ends, and at the end of the run how it began and where it got."""

from __future__ import annotations

import re
from collections.abc import Mapping

_MEASURE = re.compile(r"(?P<whole>.+)/(?P<what>mean|pass|maj)@(?P<k>\d+)")


def lines_of(metrics: Mapping[str, float]) -> list[str]:
    """A line for each source of each validation: `val/gsm8k  mean@4 0.512  pass@4 0.780  maj@4 0.600  256 rows`."""
    lines = []
    for whole, best in _measures(metrics).items():
        shown = [f"{what}@{k} {metrics[f'{whole}/{what}@{k}']:.3f}" for what, k in best.items()]
        counts = {name: metrics.get(f"{whole}/{name}", 0.0) for name in ("rows", "unscored")}
        shown += [f"{num:.0f} {name}" for name, num in counts.items() if num]
        lines.append("  ".join([whole, *shown]))
    return lines


def _measures(metrics: Mapping[str, float]) -> dict[str, dict[str, int]]:
    """For each `prefix/source` what was measured of it, each at its largest k."""
    found: dict[str, dict[str, int]] = {}
    for match in (_MEASURE.fullmatch(name) for name in metrics):
        if match is not None:
            best = found.setdefault(match["whole"], {})
            best[match["what"]] = max(best.get(match["what"], 0), int(match["k"]))
    order = ("mean", "pass", "maj")
    return {whole: {what: best[what] for what in order if what in best} for whole, best in sorted(found.items())}


class Validations:
    """The first and the last value of every measure."""

    def __init__(self) -> None:
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._num: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """The metrics of a step, whether or not there was a validation in it."""
        for whole, best in _measures(metrics).items():
            for name in (f"{whole}/{what}@{k}" for what, k in best.items()):
                self._first.setdefault(name, metrics[name])
                self._last[name] = metrics[name]
                self._num[name] = self._num.get(name, 0) + 1

    def rows(self) -> list[tuple[str, str, str]]:
        """For a table: what, its value in the first validation, empty where that is the last, and in the last."""
        first = {name: f"{value:.3f}" if self._num[name] > 1 else "" for name, value in self._first.items()}
        return [(name, first[name], f"{value:.3f}") for name, value in self._last.items()]
