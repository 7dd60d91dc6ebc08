"""Loading causal language models and tokenizers by shipped name, folder, GGUF file or hub id."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flowrl.convert import folder_of_gguf, quiet
from flowrl.model import ModelSpec
from flowrl.model_files import (
    DECODER_FIX,
    GGUF,
    MODEL_FILES,
    TOKENIZER_FILES,
    ModelError,
    causal_fault,
    fault_of,
    gguf_file,
    is_local,
    local_folder,
    template_fault,
    template_text,
)
from flowrl.node import Context
from flowrl.nodes._backend.hub import not_given, reached

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")


def resolve(path: str, revision: str | None = None, files: Sequence[str] = MODEL_FILES) -> str:
    """Where to load from: a folder with one of the files, be it that of a GGUF file's model, or a hub id.

    Raises `ModelError` for what is neither, and for a hub that does not answer.
    """
    fault = fault_of(path, files)
    if fault is not None:
        raise ModelError(fault.fact, fault.fix)
    source, folder = gguf_file(path), local_folder(path)
    if source is not None:
        return str(folder_of_gguf(source))
    return str(folder) if folder is not None else reached(path, revision, files[0])


def folder_of(spec: ModelSpec) -> str:
    """What another program can load the model from: a folder, or a hub id to take the spec's `revision` of."""
    return resolve(spec.path, spec.revision)


def load_model(spec: ModelSpec, device: str = "cpu") -> PreTrainedModel:
    """The model in evaluation mode: no dropout in any pass, or the ratio to the rollout would not start at 1."""
    from transformers import AutoModelForCausalLM

    require_causal(spec)
    where, options = folder_of(spec), weight_options(spec)
    model, info = _load(spec.path, "model", lambda: AutoModelForCausalLM.from_pretrained(where, **options))
    if info["missing_keys"] or info["mismatched_keys"]:
        names = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
        raise ModelError(f"the weights of model '{spec.path}' lack {len(names)} parameters, the first is '{names[0]}'")
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def require_causal(spec: ModelSpec) -> None:
    """Raises `ModelError` for a model that transformers does not know as a causal language model."""
    from transformers import AutoModelForCausalLM

    config = config_of(spec, folder_of(spec))
    if fault := causal_fault(spec.path):
        raise ModelError(fault.fact, fault.fix)
    has_own_code = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    reads_both_ways = getattr(config, "is_decoder", None) is False  # only models that could do that have the setting
    if (type(config) not in AutoModelForCausalLM._model_mapping and not has_own_code) or reads_both_ways:
        fact = f"model '{spec.path}' is of type '{config.model_type}', which is no causal language model"
        raise ModelError(fact, DECODER_FIX)


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """The tokenizer that the model is to be used with. Raises `ModelError`, also for a vocabulary that is too large."""
    from transformers import AutoTokenizer

    path = spec.tokenizer or spec.path
    where = folder_of(spec) if spec.tokenizer is None else resolve(path, files=TOKENIZER_FILES)
    if path.startswith(GGUF) and not any((Path(where) / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(
            f"nobody can tell how the vocabulary of '{path}' splits text: give `tokenizer:` the folder or hub id of "
            "the model that the file was made of"
        )
    options = _options(spec)
    if spec.tokenizer is not None:
        options.pop("revision", None)
    tokenizer: Any = _load(path, "tokenizer", lambda: AutoTokenizer.from_pretrained(where, **options))
    if spec.tokenizer is not None:
        size = config_of(spec, folder_of(spec)).get_text_config().vocab_size
        if len(tokenizer) > size:
            fact = f"the tokenizer '{path}' has {len(tokenizer):,} words, the model '{spec.path}' knows {size:,}"
            raise ModelError(f"{fact}: take the tokenizer that the model was trained with")
    if spec.chat_template is not None:
        _use_template(tokenizer, spec.chat_template)
    found: PreTrainedTokenizerBase = tokenizer
    return found


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
    return shared(context, "model", lambda: _frozen(context))


def _frozen(context: Context) -> PreTrainedModel:
    from flowrl.nodes._backend.parallel import shard, will_be_sharded
    from flowrl.nodes._backend.value_head import load_headed

    spec = context.model_spec
    if not will_be_sharded(spec, context):
        return load_headed(spec, context.device)
    model = load_headed(spec)
    shard(model, spec, context)
    return model


def use_threads(context: Context) -> None:
    """Keep torch to the worker's share of the cores: two workers that take all of them slow each other tenfold."""
    import torch

    torch.set_num_threads(context.num_threads)


def _options(spec: ModelSpec) -> dict[str, Any]:
    revision = {} if spec.revision is None else {"revision": spec.revision}
    # False and not None: transformers would ask on the terminal, where a worker has none.
    return {**revision, "trust_remote_code": spec.trust_remote_code}


def weight_options(spec: ModelSpec) -> dict[str, Any]:
    """What `from_pretrained` of any kind of model is told, so that it says what it has loaded."""
    import torch

    attention = {} if spec.attn_implementation is None else {"attn_implementation": spec.attn_implementation}
    return _options(spec) | attention | {"dtype": getattr(torch, spec.dtype), "output_loading_info": True}


def config_of(spec: ModelSpec, where: str) -> Any:
    """The configuration of the model that lies there. Raises `ModelError`."""
    from transformers import AutoConfig

    return _load(spec.path, "model", lambda: AutoConfig.from_pretrained(where, **_options(spec)))


def _use_template(tokenizer: Any, template: str) -> None:
    """Give the tokenizer another chat template, and try it: a wrong one would fail at every prompt."""
    fault = template_fault(template)
    if fault is not None:
        raise ModelError(fault.fact, fault.fix)
    tokenizer.chat_template = template_text(template)
    said = "1+1="
    try:
        turn = [{"role": "user", "content": said}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # whatever a template raises
        raise ModelError(f"the `chat_template` cannot present a user's turn: {error}") from error
    if said not in text:
        raise ModelError("the `chat_template` leaves out what the user says: it should show message['content']")


def _load(path: str, what: str, load: Callable[[], Any]) -> Any:
    quiet()
    try:
        return load()
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n", 1)[0].rstrip(".")
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"the {what} '{path}' needs Python files that come with it",
                "if you trust those who wrote them, set `trust_remote_code: true`: they may do whatever you may do",
            ) from error
        if is_local(path) or not isinstance(error, OSError):
            raise ModelError(f"the {what} in '{path}' cannot be loaded: {reason}") from error
        raise ModelError(not_given(path, reason)) from error
