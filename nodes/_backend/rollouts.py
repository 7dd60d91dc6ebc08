"""What rollouts of any kind do around an engine: prompts to token ids, responses to metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowrl.metrics import metric
from flowrl.nodes._backend.chat import ChatTemplateError
from flowrl.nodes._backend.engine import Completion, Engine
from flowrl.rows import Array


def encoded(engine: Engine, prompts: Sequence[Any]) -> list[list[int] | Exception]:
    """Token ids, or why a prompt has none: all at once, which is fast, and one by one where one of them fails.

    A chat template that cannot be trusted is the pipeline's fault, not a prompt's: it ends the run.
    """
    try:
        return [*engine.encode(prompts)]
    except ChatTemplateError:
        raise
    except Exception as error:
        return [error] if len(prompts) == 1 else [ids for prompt in prompts for ids in encoded(engine, [prompt])]


def report(done: Sequence[Completion], prompt_lengths: Array, prefix: str = "rollout") -> None:
    """Metrics of finished sessions. Lengths are of all tokens, whatever a mask of the loss leaves out later."""
    lengths = np.array([len(each.ids) for each in done], dtype=np.int64)
    metric(f"{prefix}/tokens", lengths.sum(), reduce="sum")
    for name, found in ((f"{prefix}/response_length", lengths), (f"{prefix}/prompt_length", prompt_lengths)):
        metric(f"{name}/mean", found.sum(), len(found))
        if len(found):
            metric(f"{name}/min", found.min(), reduce="min")
            metric(f"{name}/max", found.max(), reduce="max")
    for reason in ("stop", "length", "abort"):
        metric(f"{prefix}/finish/{reason}", sum(each.finish_reason == reason for each in done), len(done))
    oldest = [int(each.versions.min()) for each in done if len(each.versions)]
    metric(f"{prefix}/policy_version/mean", sum(oldest), len(oldest))
    if oldest:
        metric(f"{prefix}/policy_version/min", min(oldest), reduce="min")
