"""What vLLM is asked for, and what it returns of a session as what flowrl stores of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from flowrl.nodes._backend.engine import Aborted, Completion, Request, Sampling
from flowrl.rows import Array

FIRST_VERSION = "default"
"""What vLLM calls the weights that it has loaded itself."""


def params_of(request: Request, sampling: Sampling, max_length: int, end_tokens: Sequence[int]) -> SamplingParams:
    """How vLLM samples the sessions of a request, each from a random stream of its own.

    At temperature 0 they are all the same: vLLM makes one, and refuses to make more.
    """
    first, num_sessions = request.seeds[0], len(request.seeds)
    assert list(request.seeds) == list(range(first, first + num_sessions)), "vLLM counts seeds up in a group"
    return SamplingParams(
        n=num_sessions if sampling.temperature else 1,
        seed=first,
        max_tokens=min(sampling.max_tokens, max_length - len(request.prompt)),
        temperature=sampling.temperature,
        stop=list(sampling.stop),
        stop_token_ids=list(end_tokens),
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def session_of(output: CompletionOutput, text: str) -> Completion | Exception:
    """One session; log-probabilities that are not there, or are no numbers, make it a failed one."""
    if output.finish_reason == "abort":
        return Aborted(f"after {len(output.token_ids)} tokens")
    ids = np.array(output.token_ids, dtype=np.int64)
    try:
        return Completion(
            ids, log_probs_of(output, ids), versions_of(output, len(ids)), text, str(output.finish_reason)
        )
    except ValueError as error:
        return error


def log_probs_of(output: CompletionOutput, ids: Array) -> Array:
    """Log-probability (T,) float32 of each sampled token. Raises `ValueError` where one is missing."""
    given = output.logprobs
    if given is None or len(given.start_indices) < len(ids):
        num = 0 if given is None else len(given.start_indices)
        raise ValueError(f"vLLM gave log-probabilities of {num} of {len(ids)} tokens")
    first = np.array(given.start_indices[: len(ids)], dtype=np.int64)
    if (np.array(given.token_ids, dtype=np.int64)[first] != ids).any():
        raise ValueError("vLLM gave log-probabilities of other tokens than the sampled ones")
    log_probs = np.array(given.logprobs, dtype=np.float32)[first]
    if not np.isfinite(log_probs).all():
        raise ValueError("vLLM gave a log-probability that is not finite: the model's logits hold NaN or infinity")
    return log_probs


def versions_of(output: CompletionOutput, num_tokens: int) -> Array:
    """Version (T,) int64 of the weights that made each token."""
    versions = np.zeros(num_tokens, dtype=np.int64)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = 0 if span.version == FIRST_VERSION else int(span.version)
    return versions
