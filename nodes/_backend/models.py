"""Loading causal language models and tokenizers by shipped name, folder or hub id."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowrl.model import ModelSpec
from flowrl.node import Context

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

ASSETS = Path(__file__).parent.parent / "assets"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

T = TypeVar("T")


class ModelError(ValueError):
    """A model cannot be used: the message says which, why, and what to do."""


def resolve(path: str) -> str:
    """Where to load from: the folder of a shipped model, a folder of the user's, or a hub id. Raises `ModelError`."""
    shipped = ASSETS / path
    if shipped.is_dir() and shipped.parent == ASSETS:
        return str(shipped)
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"model folder '{path}' has no config.json: give a folder made by `save_pretrained`")
        return str(folder)
    if not HUB_ID.fullmatch(path) or folder.exists():
        raise ModelError(f"there is no model folder '{path}'; {_shipped_names()}")
    return path


def load_model(spec: ModelSpec, device: str = "cpu") -> PreTrainedModel:
    """The model in evaluation mode: no dropout in any pass, or the ratio to the rollout would not start at 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    _quiet()
    where = resolve(spec.path)
    config = _fetch(spec.path, "model", lambda: AutoConfig.from_pretrained(where))
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"model '{spec.path}' is of type '{config.model_type}', which is no causal language model")
    model, info = _fetch(
        spec.path,
        "model",
        lambda: AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, spec.dtype), output_loading_info=True),
    )
    if info["missing_keys"] or info["mismatched_keys"]:
        names = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ModelError(f"the weights of model '{spec.path}' lack {len(names)} parameters, the first is '{names[0]}'")
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer that lies with the model."""
    from transformers import AutoTokenizer

    _quiet()
    where = resolve(path)
    tokenizer: PreTrainedTokenizerBase = _fetch(path, "tokenizer", lambda: AutoTokenizer.from_pretrained(where))
    return tokenizer


def end_tokens(*sources: int | Sequence[int] | None) -> list[int]:
    """All ids that end a response: configurations hold one, several in any order, or none."""
    found: set[int] = set()
    for source in sources:
        found.update([source] if isinstance(source, int) else source or [])
    return sorted(found)


def shared(context: Context, kind: str, make: Callable[[], T]) -> T:
    """What all nodes of this worker that use the same model have in common, made by the first that asks."""
    key = (kind, context.model)
    if key not in context.shared:
        context.shared[key] = make()
    found: T = context.shared[key]
    return found


def frozen_model(context: Context) -> PreTrainedModel:
    """The context's model, loaded once per worker, with weights that never change."""
    # Its parameters still ask for gradients: without that torch picks other kernels, and the last bits would differ
    # from those of a training model with the same weights.
    return shared(context, "model", lambda: load_model(context.model_spec, context.device))


def use_threads(context: Context) -> None:
    """Keep torch to the worker's share of the cores: two workers that take all of them slow each other tenfold."""
    import torch

    torch.set_num_threads(context.num_threads)


def _fetch(path: str, what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        if Path(resolve(path)).is_dir():
            raise ModelError(f"the {what} in '{path}' cannot be loaded: {reason}") from error
        raise ModelError(
            f"the {what} '{path}' is neither shipped nor a folder, and the hub does not give it: {reason}. "
            f"Check the name and the network, or give the path of a local folder; {_shipped_names()}"
        ) from error


def _shipped_names() -> str:
    return "shipped: " + ", ".join(sorted(path.name for path in ASSETS.iterdir() if path.is_dir()))


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
