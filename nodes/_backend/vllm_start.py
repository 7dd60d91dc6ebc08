"""What vLLM is started with: its arguments from the pipeline's settings, and the environment of its processes."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from flowrl.model_files import ModelError
from flowrl.node import Context
from flowrl.nodes._backend import vllm_plugin
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Engine
from flowrl.nodes._backend.models import folder_of

CPU_CACHE_BYTES = 1 << 30
"""Keys and values on a CPU, where vLLM would take most of the machine's memory."""

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Its processes are ended at once; Python puts away the memory that they shared, and need not say so.
    "PYTHONWARNINGS": "ignore:resource_tracker",
    vllm_plugin.MARK: "1",
}
"""All processes of an engine run on one machine; they end with the worker, and report nothing home."""


def make_engine(
    context: Context, chat: ChatFormat, max_sequences: int | None, tensor_parallel: int, options: Mapping[str, Any]
) -> Engine:
    """Start vLLM with the context's model; `options` go over the arguments that flowrl chooses."""
    if importlib.util.find_spec("vllm") is None:
        raise ModelError("engine: vllm needs vLLM, which is not installed here: pip install 'flowrl[vllm]'")
    from flowrl.nodes._backend.vllm_engine import VllmEngine

    arguments = arguments_of(context, max_sequences, tensor_parallel, options)
    return VllmEngine(context.model_spec, arguments, process_environment(context, arguments), chat)


def arguments_of(
    context: Context, max_sequences: int | None, tensor_parallel: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """vLLM's arguments: those that flowrl chooses, and the user's options over them."""
    return default_arguments(context, max_sequences, tensor_parallel) | dict(options)


def default_arguments(context: Context, max_sequences: int | None, tensor_parallel: int) -> dict[str, Any]:
    """vLLM's arguments, those of a CPU chosen for a quick start."""
    spec = context.model_spec
    arguments: dict[str, Any] = {
        "model": folder_of(spec),
        "tokenizer": spec.tokenizer,
        "revision": spec.revision,
        "trust_remote_code": spec.trust_remote_code,
        "dtype": spec.dtype,
        "seed": context.seed % 2**32,
        "tensor_parallel_size": tensor_parallel,
        # In a Ray worker vLLM would ask Ray for further ones, which the pool has not reserved.
        "distributed_executor_backend": "mp",
        "logprobs_mode": "processed_logprobs",  # after the temperature, as the trainer computes them
        "weight_transfer_config": {"backend": vllm_plugin.BACKEND},
        "disable_log_stats": True,
    }
    if max_sequences is not None:
        arguments["max_num_seqs"] = max_sequences
    if context.device == "cpu":
        # -1: the length that fits the cache, where the model's own would not.
        arguments |= {"kv_cache_memory_bytes": CPU_CACHE_BYTES, "max_model_len": -1, "enforce_eager": True}
        # A prompt read in chunks rewinds its session's random numbers, which torch cannot do on a CPU: vLLM 0.32 dies.
        return arguments | {"enable_chunked_prefill": False}
    return arguments | {"enable_sleep_mode": True}


def process_environment(context: Context, arguments: Mapping[str, Any]) -> dict[str, str]:
    """What vLLM's processes find in their environment; what the user has set there comes first."""
    environment = dict(ENVIRONMENT)
    if context.device == "cpu":
        # The worker's share of the cores, which the processes of a split model divide.
        threads = max(1, context.num_threads // arguments["tensor_parallel_size"])
        environment |= {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if arguments["enforce_eager"]:
            # One function of the sampler would be compiled all the same, which takes ten seconds and gains nothing.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    elif arguments["tensor_parallel_size"] > 1:  # on CUDA; not proven yet
        devices = os.environ["FLOWRL_POOL_DEVICES"].split(",")
        own = devices[context.rank : context.rank + arguments["tensor_parallel_size"]]
        return environment | {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    ours = ("OMP_NUM_THREADS", vllm_plugin.MARK)
    return environment | {name: os.environ[name] for name in environment if name in os.environ and name not in ours}
