"""One value per prompt from the rewards of its sessions: what the rewards of other sessions are compared with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flowrl.batch import Prompt, Sample
from flowrl.node import Node
from flowrl.nodes._backend.comparing import Scores


class Baseline(Node):
    """The mean reward of each prompt's sessions; of a greedy rollout, which has one session, its reward."""

    scope = "group"

    class Out(NamedTuple):
        baseline: Prompt[float]

    def run(self, reward: Sample[float]) -> Out:
        groups = Scores.of(reward).groups
        return self.Out(Prompt(reward.rows, np.where(groups.num_scored > 0, groups.mean, np.nan)))
