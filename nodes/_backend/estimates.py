"""How often a model is right when it may try several times: pass@k and the vote of a majority."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb


@lru_cache(maxsize=65536)
def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that at least one of k samples is right, when c of n were: 1 - C(n-c, k) / C(n, k), without bias.

    Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, equation 1. Needs k <= n.
    """
    assert 0 <= num_right <= num_samples and 0 < k <= num_samples, "k samples are drawn from those that there are"
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to the limit."""
    return [1 << exponent for exponent in range(limit.bit_length())]


def majority(answers: Sequence[Hashable | None], right: Sequence[bool]) -> float:
    """Chance that the answer that most samples give is right; None is a sample without an answer, which has no vote.

    Of answers with equally many votes one is drawn by lot: their mean counts. An answer that was right in one sample
    and wrong in another is as right as its samples are on average. Without any vote there is nothing right: 0.
    """
    votes: defaultdict[Hashable, list[bool]] = defaultdict(list)
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes[answer].append(is_right)
    most = max(map(len, votes.values()), default=0)
    leading = [sum(each) / most for each in votes.values() if len(each) == most]
    return sum(leading) / len(leading) if leading else 0.0
