"""Rows of tokens as a model takes them: padded to a rectangle, each distinct prompt once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowrl.rows import Jagged


def padded_inputs(prompts: Jagged, responses: Jagged) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Token ids and attention mask, both (N, longest prompt + longest response - 1), int64.

    The column before the first response token is the same in all rows. Padding holds id 0, and is never attended to.
    """
    prompt_width, width = int(prompts.lengths.max()), max(int(responses.lengths.max()), 1)
    column = np.arange(prompt_width + width)
    start, stop = prompt_width - prompts.lengths, prompt_width + responses.lengths
    mask = (column >= start[:, None]) & (column < stop[:, None])
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[:, :prompt_width][mask[:, :prompt_width]] = flat(prompts)
    ids[:, prompt_width:][mask[:, prompt_width:]] = flat(responses)
    return ids[:, :-1], mask[:, :-1].astype(np.int64)


def distinct(prompts: Jagged) -> tuple[Jagged, NDArray[np.int64]]:
    """The distinct prompts, and which of them each row has."""
    seen: dict[bytes, int] = {}
    index = np.array([seen.setdefault(prompt.tobytes(), len(seen)) for prompt in prompts], dtype=np.int64)
    return prompts.take(np.unique(index, return_index=True)[1]), index


def positions_of(responses: Jagged) -> NDArray[np.int64]:
    """The position (T,) of each response token in its row."""
    position: NDArray[np.int64] = (
        np.arange(responses.offsets[0], responses.offsets[-1]) - responses.offsets[responses.row]
    )
    return position


def flat(jagged: Jagged) -> NDArray[Any]:
    """The values of the rows alone, where the array holds more than them; a copy, as torch wants writable memory."""
    return np.array(jagged.values[jagged.offsets[0] : jagged.offsets[-1]], dtype=np.int64)
