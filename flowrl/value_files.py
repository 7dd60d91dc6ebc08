"""Whether a folder gives a critic: a causal language model, or a classifier whose one label is a value.

The check before launch and the loading in a worker ask the same function, so they give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.model_files import Fault, causal_fault, config_in, local_folder

CLASSIFIER = "ForSequenceClassification"
"""What the architecture of a classifier of texts ends in."""


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is that of a classifier of texts."""
    kinds = config.get("architectures") or []
    return isinstance(kinds, list) and bool(kinds) and all(str(kind).endswith(CLASSIFIER) for kind in kinds)


def value_fault(path: str, trainable: bool, config: Mapping[str, Any] | None = None) -> Fault | None:
    """Why a model, whose name is right, gives no critic; None where that cannot be told from its configuration.

    That is the one given, else that of its folder, if it has one here.
    """
    if config is None:
        folder = local_folder(path)
        config = config_in(folder) if folder is not None else None
    if config is None:
        return None
    if is_classifier(config):
        labels = config.get("id2label")
        num = len(labels) if isinstance(labels, dict) else 2
        fix = "give a reward model, or a causal language model, whose values start at 0"
        return None if num == 1 else Fault(f"'{path}' is a classifier with {num} labels, and a value is a number", fix)
    if fault := causal_fault(path):
        return fault
    fact = f"'{path}' has no value head, and one that never trains would say 0 of every token"
    return None if trainable else Fault(fact, f"trainable: true, or a model saved as ...{CLASSIFIER} with one label")
