"""What rollouts of any kind do around an engine: prompts to token ids, responses to metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flowrl.metrics import metric
from flowrl.nodes._backend.chat import ChatTemplateError
from flowrl.nodes._backend.engine import Completion, Engine


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


def report(done: Sequence[Completion]) -> None:
    """Metrics of finished sessions."""
    lengths = [len(each.ids) for each in done]
    metric("rollout/tokens", sum(lengths), reduce="sum")
    metric("rollout/response_length/mean", sum(lengths), len(lengths))
    metric("rollout/response_length/max", max(lengths, default=0), reduce="max")
    for reason in ("stop", "length", "abort"):
        metric(f"rollout/finish/{reason}", sum(each.finish_reason == reason for each in done), len(done))
