"""Dynamic sampling: only groups whose sessions were rewarded differently are trained on.

Source: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", arXiv:2503.14476, equation 11,
which asks that some answers of a group, but not all, are right. Here it is asked of any reward that two sessions of the
group differ: that is when the advantages of `advantage.grpo` are not all 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowrl.batch import Prompt, Sample
from flowrl.gate import Gate
from flowrl.metrics import metric
from flowrl.nodes._backend.sessions import extremes, sessions


class Informative(Gate):
    """Keep the groups whose sessions have different rewards; the others say nothing about what was better."""

    compares_samples = True

    threshold: float = 0.5
    """A group whose rewards are all the same counts as all right if they are above this, else as all wrong."""

    class Out(NamedTuple):
        keep: Prompt[bool]

    def run(self, reward: Sample[float]) -> Out:
        rows = reward.rows
        last = sessions(rows)[1]
        score = reward.values[last].astype(np.float64)
        scored = np.isfinite(score)
        score, group = score[scored], rows.group[last][scored]
        lowest, highest = extremes(score, group, rows.num_groups)
        keep = highest > lowest
        same = ~keep & (np.bincount(group, minlength=rows.num_groups) > 1)
        metric("groups/kept", keep.sum(), reduce="sum")
        metric("groups/all_right", (same & (lowest > self.threshold)).sum(), reduce="sum")
        metric("groups/all_wrong", (same & (lowest <= self.threshold)).sum(), reduce="sum")
        metric("groups/too_few_scored", (~keep & ~same).sum(), reduce="sum")
        metric("reward/tried", score.sum(), len(score))
        return self.Out(Prompt(rows, keep))
