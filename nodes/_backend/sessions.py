"""Sessions among the rows of a batch, those of several outputs once, and what the scores of a group are like."""

from __future__ import annotations

import numpy as np

from flowrl.rows import Array, Rows


def sessions(rows: Rows) -> tuple[Array, Array]:
    """Number of the session (N,) that each trajectory belongs to, and the row (S,) of each session's last output."""
    order = np.lexsort((rows.output, rows.session, rows.group))
    group, session = rows.group[order], rows.session[order]
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = (group[1:] != group[:-1]) | (session[1:] != session[:-1])
    session_of = np.empty(len(order), dtype=np.int64)
    session_of[order] = np.cumsum(is_last) - is_last
    return session_of, order[is_last]


def extremes(score: Array, group: Array, num_groups: int) -> tuple[Array, Array]:
    """Lowest and highest score (G,) of each group; infinity and minus infinity where it has none.

    Scores differ where they are compared, never where a rounded deviation is above 0.
    """
    lowest, highest = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest, group, score)
    np.maximum.at(highest, group, score)
    return lowest, highest
