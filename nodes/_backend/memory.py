"""Running out of memory in a micro-batch, said so that one knows what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from flowrl.node import Context
from flowrl.rows import Array, Rows

SIGNS = ("not enough memory", "DefaultCPUAllocator", "can't allocate memory", "out of memory", "bad_alloc")
"""What a `RuntimeError` of torch or of one of its libraries says when memory is what is missing."""
NUM_NAMES = 4

Begin = Callable[[Array, int], None]
"""Called with the positions of a micro-batch's rows, and the tokens that it computes, before it is computed."""


class OutOfMemory(RuntimeError):
    """A micro-batch did not fit; the message names the node, the rows, the tokens, and the setting to lower."""


@contextmanager
def memory_watched(context: Context, rows: Rows, max_tokens: int) -> Iterator[Begin]:
    """While this lasts, running out of memory is an `OutOfMemory` that names the micro-batch which began last."""
    begun: tuple[Array, int] | None = None

    def begin(positions: Array, num_tokens: int) -> None:
        nonlocal begun
        begun = positions, num_tokens

    try:
        yield begin
    except (MemoryError, RuntimeError) as error:
        if begun is None or not _is_out_of_memory(error):
            raise
        raise OutOfMemory(_message(context.node, rows, *begun, max_tokens)) from error


def _is_out_of_memory(error: Exception) -> bool:
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or any(sign in str(error) for sign in SIGNS)


def _message(node: str, rows: Rows, positions: Array, num_tokens: int, max_tokens: int) -> str:
    names = rows.take(positions[:NUM_NAMES]).names()
    shown = ", ".join(names) + (f" and {len(positions) - len(names)} more" if len(positions) > len(names) else "")
    setting = f"nodes.{node}.max_tokens_per_microbatch"
    size = f"{num_tokens:,} tokens, {len(positions)} row{'s' * (len(positions) != 1)}"
    fact = f"node '{node}' ran out of memory in a micro-batch of {size}: {shown}"
    if len(positions) == 1:
        return f"{fact}. It is one row, which {setting} cannot cut: shorten responses by the rollout's max_tokens"
    return f"{fact}. Lower {setting}, now {max_tokens}, below {num_tokens}"
