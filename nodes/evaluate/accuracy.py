"""How often responses are right on validation rows: mean reward, pass@k and the vote of the majority."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from flowrl.batch import Prompt, Sample
from flowrl.evaluation import Evaluation
from flowrl.metrics import metric
from flowrl.model import SettingError
from flowrl.nodes._backend.estimates import majority, pass_at_k, powers_of_two
from flowrl.nodes._backend.formulas import last_answer
from flowrl.nodes._backend.sessions import sessions

ROUNDING = 1e-6
"""A reward that misses the threshold by no more than float32 rounds is a success."""


class Scored(NamedTuple):
    """The scored samples of one row."""

    rewards: Sequence[float]
    right: Sequence[bool]
    answers: Sequence[str | None] | None
    """Final answers; None where no response is read."""


class Accuracy(Evaluation):
    """Report mean@n, pass@k and maj@n of the responses to a data set, for each of its sources.

    A sample is right if its reward reaches the threshold. What failed or was not scored is counted as `unscored` and is
    in no mean; pass@k and maj@n are those of the rows that have enough scored samples.
    """

    threshold: float = 1.0
    """Reward from which a response is right, for pass@k and maj@n."""
    answer_pattern: str | None = Field(None, min_length=1)
    """Regular expression that finds the answer in a response, by its first group, or the whole match, in the last of
    several; null takes what the last `\\boxed{...}` holds, or stands behind `####`, or the whole response."""

    @field_validator("answer_pattern")
    @classmethod
    def _is_a_pattern(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"it is no regular expression: {error}") from error
        return pattern

    @model_validator(mode="after")
    def _answers_are_compared(self) -> Self:
        if self.answer_pattern is not None and self.samples == 1:
            fact = "answer_pattern has no effect with samples: 1: it finds the answers of a vote"
            raise SettingError(("answer_pattern", "samples"), fact, "samples: 4, or leave answer_pattern out")
        return self

    def run(
        self,
        reward: Sample[float],
        response: Sample[str] | None = None,
        data_source: Prompt[str] | None = None,
    ) -> None:
        rows = reward.rows
        _, last = sessions(rows)  # the reward of a session is that of its last output
        sources = [source or self.dataset for source in data_source] if data_source is not None else []
        sources = sources or [self.dataset] * rows.num_groups
        pattern = re.compile(self.answer_pattern) if self.answer_pattern is not None else None
        last = last[np.isfinite(reward.values[last])]
        of_group: list[list[int]] = [[] for _ in sources]
        for position, group in zip(last.tolist(), rows.group[last].tolist(), strict=True):
            of_group[group].append(position)
        of_source: dict[str, list[int]] = {}
        for group, source in enumerate(sources):
            of_source.setdefault(source, []).append(group)
        for source, groups in of_source.items():
            found = []
            for index in (of_group[group] for group in groups):
                rewards = reward.values[index].astype(float).tolist()
                texts = None if response is None else response.values[index]
                answers = None if texts is None else [final_answer(text, pattern) for text in texts]
                found.append(Scored(rewards, [one >= self.threshold - ROUNDING for one in rewards], answers))
            self._report(f"{self.prefix}/{source}", found, int(rows.planned[groups].sum()))

    def _report(self, name: str, rows: Sequence[Scored], num_planned: int) -> None:
        num, num_scored = self.samples, sum(len(row.rewards) for row in rows)
        metric(f"{name}/rows", len(rows), reduce="sum")
        metric(f"{name}/unscored", num_planned - num_scored, reduce="sum")
        if num_scored:
            metric(f"{name}/mean@{num}", sum(sum(row.rewards) for row in rows), num_scored)
        for k in powers_of_two(num):
            if chances := [pass_at_k(len(row.right), sum(row.right), k) for row in rows if len(row.right) >= k]:
                metric(f"{name}/pass@{k}", sum(chances), len(chances))
        whole = [row for row in rows if len(row.right) == num]
        if num > 1 and (votes := [majority(row.answers, row.right) for row in whole if row.answers is not None]):
            metric(f"{name}/maj@{num}", sum(votes), len(votes))


def final_answer(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """The answer that a response ends in, without differences of case and white space; None where there is none."""
    if pattern is None:
        found = last_answer(text).content
    else:
        matches = list(pattern.finditer(text))
        if not matches:
            return None
        found = matches[-1][min(1, pattern.groups)] or ""
    return " ".join(found.split()).casefold() or None
