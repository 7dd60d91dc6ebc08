"""The engines of a worker: made as nodes ask for them, shared by those that ask for the same, ended once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Engine, engines_of
from flowrl.nodes._backend.fake import FakeEngine
from flowrl.nodes._backend.script import Script

MAX_SEQUENCES = 512
"""Sessions that the transformers engine generates at a time, where nobody says how many."""


def engine_for(
    context: Context,
    user: str,
    kind: str,
    chat: ChatFormat,
    script: Script,
    max_sequences: int | None,
    options: Mapping[str, Any],
    tensor_parallel: int = 1,
) -> Engine:
    """The engine of the context's model that is made in this way; `user` is who shares it: engines of rollouts sleep
    while a judge computes, so the two never have one in common.
    """
    engines = engines_of(context)
    key = repr((user, kind, chat, script, max_sequences, dict(options), tensor_parallel))
    if key not in engines:
        engines[key] = _made(context, kind, chat, script, max_sequences, options, tensor_parallel)
    return engines[key]


def close_engines(context: Context) -> None:
    """End the engines of the context's model, each once, whichever of the nodes that share them comes first."""
    engines = engines_of(context)
    while engines:
        engines.popitem()[1].close()


def _made(
    context: Context,
    kind: str,
    chat: ChatFormat,
    script: Script,
    max_sequences: int | None,
    options: Mapping[str, Any],
    tensor_parallel: int,
) -> Engine:
    if kind == "fake":
        return FakeEngine(script, context.model_spec.path)
    from flowrl.nodes._backend.models import use_threads

    use_threads(context)
    if kind == "vllm":
        from flowrl.nodes._backend.vllm_start import make_engine

        return make_engine(context, chat, max_sequences, tensor_parallel, options)
    from flowrl.nodes._backend.generation import TransformersEngine

    return TransformersEngine(context.model_spec, context.device, chat, max_sequences or MAX_SEQUENCES)
