"""Reward models: sequence classifiers of transformers, and the logits that they give to texts.

Rows are padded on the right, with a token that no row of the batch ends in where the model has no padding token of its
own: decoders look for the last token that is no padding. So a text's logits depend on that text alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flowrl.model import ModelSpec
from flowrl.model_files import ModelError
from flowrl.nodes._backend.chat import Prompt
from flowrl.nodes._backend.models import folder_of, weight_options
from flowrl.rows import Array, Jagged

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_classifier(spec: ModelSpec, device: str) -> PreTrainedModel:
    """The model in evaluation mode. Raises `ModelError`, also where it has no head that was trained to classify."""
    from transformers import AutoModelForSequenceClassification

    where = folder_of(spec)
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(where, **weight_options(spec))
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ModelError(f"the reward model '{spec.path}' cannot be loaded: {reason}") from error
    missing = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if missing:
        raise ModelError(
            f"'{spec.path}' is no reward model: its weights lack '{missing[0]}', which would be drawn by chance; give "
            "a model saved as a sequence classifier"
        )
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def encode_dialogue(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, response: str) -> list[int]:
    """Token ids of a prompt and its response: through the chat template where there is one, else joined as text.

    Raises `ValueError` for messages without a template, and where there are no tokens at all.
    """
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(turn) for turn in prompt]
        turns.append({"role": "assistant", "content": response})
        text = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif isinstance(prompt, str):
        ids = tokenizer(prompt + response)["input_ids"]
    else:
        raise ValueError("the prompt is a list of messages, but the reward model's tokenizer has no chat template")
    if not ids:
        raise ValueError("prompt and response have no tokens")
    return list(ids)


def max_length(model: PreTrainedModel) -> int:
    """Tokens that the model can read."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or np.iinfo(np.int64).max)


def logits_of(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Array:
    """(N, labels) logits of N texts of one token or more, float32."""
    import torch

    jagged = Jagged.of(texts, np.int64)
    config = model.config.get_text_config()
    own = config.pad_token_id
    # Not one that a row ends in: it would be taken for padding.
    fill = own if own is not None else _unused({int(ids[-1]) for ids in texts})
    ids = torch.from_numpy(jagged.padded(fill).astype(np.int64)).to(model.device)
    mask = torch.from_numpy((np.arange(ids.shape[1]) < jagged.lengths[:, None]).astype(np.int64)).to(model.device)
    config.pad_token_id = fill
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, attention_mask=mask).logits
    finally:
        config.pad_token_id = own
    values: Array = logits.float().cpu().numpy()
    return values


def _unused(taken: set[int]) -> int:
    return next(token for token in range(len(taken) + 1) if token not in taken)
