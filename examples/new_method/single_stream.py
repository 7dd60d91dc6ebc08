"""Single-stream Policy Optimization (SPO): Xu and Ding, arXiv:2509.13232.

One response to a prompt is enough: it is compared with what earlier responses to the same prompt earned. Of each prompt
a tracker keeps the discounted number n of responses, and what they earned on average, v. A response with reward r has

    A = r - v,    whitened over all responses of the batch: (A - mean of A) / std of A

with v as it was before the batch. Then k new responses to the prompt change what is known of it, and older ones fade:

    n' = rho * n + k,    v' = (rho * n * v + sum of their r) / n'

which for rewards of 0 and 1 is the mean of the Beta distribution of the paper: alpha = n * v, beta = n * (1 - v).
We depart where rho is a setting, and not adapted to the divergence of the policy from the one that last answered; where
v begins at `start` with the weight of 1 / (1 - rho) responses, and not at an estimate made before training; and where
prompts come in the order of the data, and not by how unsure v is. Equal advantages give exactly 0.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from flowrl import Context, Json, Node, Prompt, Sample, Token, metric


class SingleStream(Node):
    """Compare each reward with what the same prompt earned before, whitened over the batch."""

    scope = "batch"  # it is called with the whole batch, over which it whitens
    pure = False  # it remembers every prompt

    rho: float = Field(0.9, ge=0, lt=1)
    """What an earlier response still counts for when its prompt is answered again."""
    start: float = 0.5
    """What a prompt is thought to earn before it was ever answered."""

    class Out(NamedTuple):
        advantages: Token[float]
        loss_mask: Token[bool]

    def setup(self, context: Context) -> None:
        self._tracked: dict[str, tuple[float, float]] = {}  # n and v of each prompt

    def run(self, prompt: Prompt[Json], reward: Sample[float], response_mask: Token[bool]) -> Out:
        asked = [str(text) for text in prompt.per_sample(reward).values]
        texts, which = np.unique(asked, return_inverse=True)  # two groups may ask the same
        scored = np.isfinite(reward.values)  # a reward that could not be scored is NaN here, never 0
        value = np.where(scored, reward.values, 0.0).astype(np.float64)
        expected = self._learn(texts.tolist(), np.bincount(which, scored), np.bincount(which, value))
        advantage = np.zeros(len(value))
        advantage[scored] = whitened(value[scored] - expected[which[scored]])
        metric("reward/mean", value.sum(), scored.sum())  # what the line of a step shows
        metric("single_stream/expected", expected[which].sum(), len(which))
        metric("single_stream/prompts", len(self._tracked), reduce="last")
        trained = response_mask & Sample(reward.rows, scored).per_token(response_mask)
        return self.Out(Sample(reward.rows, advantage).per_token(response_mask) * trained, trained)

    def _learn(self, texts: list[str], count: NDArray[Any], earned: NDArray[Any]) -> NDArray[Any]:
        """Of P prompts: what each was expected to earn (P,), before `count` responses (P,) that earned so much (P,)."""
        unknown = (1 / (1 - self.rho), self.start)
        n, v = np.array([self._tracked.get(text, unknown) for text in texts]).reshape(-1, 2).T
        total = self.rho * n + count
        after = np.divide(self.rho * n * v + earned, total, out=v.copy(), where=count > 0)
        seen = np.flatnonzero(count)
        self._tracked.update({texts[i]: (float(total[i]), float(after[i])) for i in seen})
        return v

    def state(self) -> dict[str, Any]:
        return {"tracked": self._tracked}

    def load_state(self, state: dict[str, Any]) -> None:
        self._tracked = state["tracked"]


def whitened(values: NDArray[Any]) -> NDArray[Any]:
    """Their distance from the mean over the standard deviation; 0 where all are equal."""
    if not len(values) or values.min() == values.max():
        return np.zeros_like(values)
    return (values - values.mean()) / values.std()
