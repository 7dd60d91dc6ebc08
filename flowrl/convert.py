"""GGUF files as model folders: what transformers makes of one, written as `save_pretrained` writes any model.

Weights become float32, which holds what every kind of block stands for exactly. Where transformers would silently make
another model or another tokenizer of a file, it is refused: scaled rotary positions, values that it leaves out, a
vocabulary whose words are split in a way that nobody knows. Such a file still gives its weights, with the `tokenizer`
of another folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.gguf_header import GgufHeader, read_header
from flowrl.model_files import GGUF, ModelError, cache_folder, fault_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_END_KEYS = ("eos", "eot", "eom")
"""Of the tokens that end a text, a turn, or a message: all of them end a response."""
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Vocabularies learned with every digit apart, and otherwise split as GPT-2 splits (llama.cpp's `pre` names)."""
_LIKE_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling")


def folder_of_gguf(file: Path) -> Path:
    """The folder of a GGUF file's model, made once and kept in the cache. Raises `ModelError`.

    It is made again when the file changes, and when transformers does, which may learn to read it better.
    """
    folder = cache_folder() / "gguf" / f"{file.stem}-{_fingerprint(file)}"
    try:
        convert(file, folder)
    except OSError as error:
        raise ModelError(
            f"cannot write the model of '{file}' to '{folder}': {error.strerror or error}; XDG_CACHE_HOME names "
            "another folder for what may be made again"
        ) from error
    return folder


def convert(file: Path, folder: Path, say: Callable[[str], None] = lambda _: None, *, again: bool = False) -> None:
    """Write the model of a GGUF file to a folder, whole or not at all, unless it is there; `say` is told of each stage.

    Raises `ModelError` for a file that cannot be converted, `OSError` for a folder that cannot be written.
    """
    if is_model(folder) and not again:
        return
    from filelock import FileLock

    _refuse_fault(file)
    locks = cache_folder() / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    name = hashlib.blake2b(os.path.abspath(folder).encode(), digest_size=8).hexdigest()
    with FileLock(locks / f"{name}.lock"):  # two workers that need a model at once make it once
        if again or not is_model(folder):
            _convert(file, folder, say)


def is_model(folder: Path) -> bool:
    """Whether the folder holds a whole model: its configuration is written last."""
    return (folder / "config.json").is_file()


def quiet() -> None:
    """Neither warnings nor progress bars of transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _convert(file: Path, folder: Path, say: Callable[[str], None]) -> None:
    quiet()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
    unfinished.mkdir(parents=True)  # at once: what cannot be written need not be read
    try:
        say("reading the vocabulary")
        header = _header_of(file)
        tokenizer = _tokenizer(file, header)
        say(f"reading {len(header.tensors)} tensors, {sum(header.tensors.values()):,} values")
        model = _model(file, header)
        say(f"writing {folder}")
        model.save_pretrained(unfinished)
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
        # Files as whoever runs this wants them: weights are written for their owner alone.
        mode = (unfinished / "config.json").stat().st_mode
        for path in unfinished.iterdir():
            path.chmod(mode)
        _move(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _refuse_fault(file: Path) -> None:
    fault = fault_of(f"{GGUF}{file}")
    if fault is not None:
        raise ModelError(f"{fault.fact}; {fault.fix}")


def _fingerprint(file: Path) -> str:
    """Of the file's size, time and both ends, and of what converts it: a whole large file would take seconds."""
    _refuse_fault(file)
    about, end = file.stat(), 1 << 20
    digest = hashlib.blake2b(digest_size=8)
    with file.open("rb") as opened:
        digest.update(opened.read(end))
        opened.seek(max(about.st_size - end, 0))
        digest.update(opened.read(end))
    parts = (about.st_size, about.st_mtime_ns, importlib.metadata.version("transformers"))
    digest.update("/".join(map(str, parts)).encode())
    return digest.hexdigest()


def _header_of(file: Path) -> GgufHeader:
    """The header. Raises `ModelError` where transformers would make another model of the file."""
    try:
        header = read_header(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"the GGUF file '{file}' cannot be read: {error}") from error
    scaled = [name for name in header.tensors if name.startswith(("rope_freqs", "rope_factors"))]
    if scaled or header.of_model("rope.scaling.type") not in (None, "none"):
        what = scaled[0] if scaled else "rope.scaling.type"
        raise ModelError(
            f"the GGUF file '{file}' scales its rotary positions ({what}), which transformers does not read: give the "
            "folder or hub id of the model that it was made of"
        )
    if int(header.metadata.get("split.count", 1)) > 1:
        raise ModelError(f"'{file}' is one of {header.metadata['split.count']} parts of a GGUF file: merge them first")
    return header


def _model(file: Path, header: GgufHeader) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM

    # A plain model of the same configuration: one that was loaded from GGUF is taken for a quantized one.
    loaded, info = _read(
        file,
        "weights",
        lambda: AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
        ),
    )
    lost = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if lost:
        raise ModelError(f"the GGUF file '{file}' lacks {len(lost)} parameters, the first is '{lost[0]}'")
    config = loaded.config
    tied = config.get_text_config().tie_word_embeddings
    there = sum(num for name, num in header.tensors.items() if not (tied and name == "output.weight"))
    if there != loaded.num_parameters() or any(not one.is_floating_point() for one in loaded.parameters()):
        raise ModelError(
            f"the GGUF file '{file}' holds {there:,} values, and transformers makes a model of "
            f"{loaded.num_parameters():,} of them: give the folder or hub id of the model that it was made of"
        )
    del config.quantization_config
    vars(config).pop("_model_name_or_path", None)
    with torch.device("meta"):
        plain: PreTrainedModel = type(loaded)._from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config.eos_token_id = _end_tokens(header) or plain.generation_config.eos_token_id
    return plain


def _end_tokens(header: GgufHeader) -> list[int]:
    ids = [header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS]
    return sorted({int(one) for one in ids if one is not None})


def _tokenizer(file: Path, header: GgufHeader) -> PreTrainedTokenizerBase | None:
    """The file's tokenizer; None for a vocabulary whose way of splitting text nobody can tell."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer: Any = _read(file, "tokenizer", lambda: AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name))
    limit = header.of_model("context_length")
    if limit is not None:
        tokenizer.model_max_length = int(limit)
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        pre = str(header.metadata.get("tokenizer.ggml.pre", ""))
        if pre in _DIGITS_ALONE:
            steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        elif pre not in (*_LIKE_GPT2, *_known_to_transformers()):
            return None
    found: PreTrainedTokenizerBase = tokenizer
    return found


def _known_to_transformers() -> Mapping[str, Any]:
    """Ways of splitting text that this version of transformers has by their `pre` names."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        return {}
    splits: Mapping[str, Any] = GGUF_PRE_TOKENIZER_SPLITS
    return splits


def _read(file: Path, what: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except ImportError as error:
        raise ModelError(f"reading GGUF files needs the package gguf: pip install gguf ({error})") from error
    except Exception as error:  # transformers raises whatever its readers do
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ModelError(f"the {what} of the GGUF file '{file}' cannot be read: {reason}") from error


def _move(made: Path, folder: Path) -> None:
    """Put a finished folder in its place; what lies there under other names stays."""
    if not folder.exists():
        os.replace(made, folder)
        return
    # The configuration last: with it a model counts as there.
    for path in sorted(made.iterdir(), key=lambda path: path.name == "config.json"):
        os.replace(path, folder / path.name)


def size_of(folder: Path) -> int:
    """Bytes of the files of a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
