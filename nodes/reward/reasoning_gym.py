"""The scorers of reasoning-gym: each task knows what a right answer is, and what a nearly right one is worth."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from flowrl.batch import Json, Prompt, Sample
from flowrl.node import Context, Node
from flowrl.nodes._backend.answers import score_of, scored

TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(Node):
    """Score a response with the scorer of the reasoning-gym task that its prompt comes from."""

    answer_tag: bool = True
    """Judge what the last `<answer>...</answer>` holds, where there is one; otherwise always the whole response."""

    class Out(NamedTuple):
        reward: Sample[float]

    def setup(self, context: Context) -> None:
        try:
            import reasoning_gym  # noqa: F401  half a second, before the time limit of a row begins
        except ModuleNotFoundError as error:
            raise RuntimeError("reasoning-gym is not installed here: pip install 'flowrl[tasks]'") from error

    def run(self, response: Sample[str], entry: Prompt[Json]) -> Out:
        texts, entries = list(response), list(entry.per_sample(response))
        found = scored(response.rows, lambda row: self._score(texts[row], entries[row]))
        return self.Out(Sample(response.rows, found))  # type: ignore[arg-type]

    def _score(self, text: str, entry: Any) -> float:
        metadata = entry.get("metadata") if isinstance(entry, Mapping) else None
        task = metadata.get("source_dataset") if isinstance(metadata, Mapping) else None
        if not isinstance(task, str):
            raise ValueError("the entry is none of reasoning-gym: it has no metadata.source_dataset")
        tagged = TAG.findall(text) if self.answer_tag else []
        return score_of(_scorer(task)((tagged[-1] if tagged else text).strip(), dict(entry)))


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], Any]:
    """`score_answer` of a task. Raises `ValueError` for one that this version does not have."""
    from reasoning_gym import get_score_answer_fn

    scorer: Callable[[str, dict[str, Any]], Any] = get_score_answer_fn(task)
    return scorer
