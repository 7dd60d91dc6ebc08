"""Whether two models mean the same by a token id, so far as their files on this machine say.

Ids alone are compared: a reader of another's tokens never splits text. Words that only the reader knows do no harm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from flowrl.graph.sizes.architecture import Architecture
from flowrl.graph.sizes.model_config import folder_here, read_architecture
from flowrl.model import ModelSpec

MOST_PADDING = 1024
"""By so many words two models of one tokenizer may differ: Qwen2.5 has 151,936 at 0.5B, and 152,064 at 7B."""
_VOCABULARIES = ("tokenizer.json", "vocab.json")


def difference(models: Mapping[str, ModelSpec], writer: str, reader: str) -> str:
    """Why model `reader` would misread the token ids that `writer` makes; empty if it would not, or no file tells."""
    ours, theirs = models[writer], models[reader]
    if (ours.path, ours.tokenizer, ours.revision) == (theirs.path, theirs.tokenizer, theirs.revision):
        return ""
    files = _vocabulary_of(ours), _vocabulary_of(theirs)
    if files[0] is not None and files[1] is not None:
        if (misread := _misread(*files)) is None:
            return ""
        word, token, other = misread
        there = f"token {other:,}" if other is not None else "no token"
        return f"{word!r} is token {token:,} of models.{writer}, and {there} of models.{reader}"
    shapes = [read_architecture(spec.path) for spec in (ours, theirs)]
    sizes = [shape.vocabulary for shape in shapes if isinstance(shape, Architecture)]
    if len(sizes) == 2 and abs(sizes[0] - sizes[1]) > MOST_PADDING:
        return f"models.{writer} knows {sizes[0]:,} words, and models.{reader} {sizes[1]:,}"
    return ""


def _vocabulary_of(spec: ModelSpec) -> Path | None:
    """The file with all words of a model's tokenizer, if it is on this machine and of a kind that is read here."""
    folder = folder_here(spec.tokenizer or spec.path)
    found = (folder / name for name in _VOCABULARIES) if folder is not None else ()
    return next((file for file in found if file.is_file()), None)


@lru_cache(maxsize=64)
def _misread(writer: Path, reader: Path) -> tuple[str, int, int | None] | None:
    """The first word that does not have the same id in both files, with its ids."""
    try:
        if writer.read_bytes() == reader.read_bytes():
            return None
        ours, theirs = _words(writer), _words(reader)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # the tokenizer itself will say what is wrong with its file
    differ = [(token, word) for word, token in ours.items() if theirs.get(word) != token]
    if not differ:
        return None
    token, word = min(differ)
    return word, token, theirs.get(word)


def _words(file: Path) -> Mapping[str, int]:
    """The id of each word. Raises what a file of another shape makes of it."""
    found: Any = json.loads(file.read_text(encoding="utf-8"))
    if file.name != _VOCABULARIES[0]:
        return {str(word): int(token) for word, token in found.items()}
    words = found["model"]["vocab"]
    if isinstance(words, list):  # a unigram model has scores in the place of ids
        words = {word: token for token, (word, _) in enumerate(words)}
    return {**words, **{token["content"]: token["id"] for token in found.get("added_tokens") or ()}}
