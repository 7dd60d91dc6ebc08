"""The Hugging Face hub: whether it answers, before anything waits for it file by file."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from flowrl.model_files import ModelError, shipped_models

SECONDS = 5.0
"""How long to wait for the first answer; the variable HF_HUB_ETAG_TIMEOUT says otherwise."""


@cache
def reached(repository: str, revision: str | None, file: str) -> str:
    """The hub id, or the folder of the hub's cache where the hub does not answer. Raises `ModelError` if that has none.

    Left to itself, transformers asks five times for each of a dozen files.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or SECONDS)
    try:
        get_hf_file_metadata(hf_hub_url(repository, file, revision=revision), timeout=seconds)
    except HfHubHTTPError:  # an answer, if not the one hoped for: transformers explains it
        return repository
    except Exception as error:  # the HTTP library's, which changes with the version
        cached = try_to_load_from_cache(repository, file, revision=revision)
        if isinstance(cached, str):
            return str(Path(cached).parent)
        reason = str(error).strip().split("\n", 1)[0].rstrip(".") or type(error).__name__
        if "timeout" in type(error).__name__.lower():
            reason = f"no answer within {seconds:g} s; the variable HF_HUB_ETAG_TIMEOUT={6 * seconds:g} waits longer"
        raise ModelError(not_given(repository, reason)) from error
    return repository


def not_given(path: str, reason: str) -> str:
    """What to tell of a model that is nowhere."""
    return (
        f"'{path}' is neither shipped nor a folder, and the hub does not give it: {reason}. Check the name and the "
        f"network, or give the path of a local folder; shipped: {', '.join(shipped_models())}"
    )
