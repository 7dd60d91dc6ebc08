"""Critics: causal language models with one linear layer to a number in the place of their head, the value of a state.

The value of a token is that of the state before it, from the hidden states that would predict it: what return the
critic expects once it has seen the prompt and the tokens before. The layer computes in float32 whatever the model does.
It starts at 0, so that before any update every value is 0, or as the head of a classifier with one label, such as a
reward model. A critic is written as such a classifier too, so other programs can load it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flowrl.model import ModelSpec
from flowrl.model_files import ModelError
from flowrl.nodes._backend.classifier import load_classifier
from flowrl.nodes._backend.models import config_of, folder_of, load_model
from flowrl.value_files import is_classifier, value_fault

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCORE = "score"
"""The head of a sequence classifier of transformers."""


class ValueHead(nn.Module):
    """Hidden states (..., H) to values (..., 1), float32."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, size))

    def forward(self, hidden: Tensor) -> Tensor:
        """The values; autocast does not narrow them."""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float())


def load_headed(spec: ModelSpec, device: str = "cpu") -> PreTrainedModel:
    """The model with the head that the spec asks for, in evaluation mode. Raises `ModelError`."""
    return load_model(spec, device) if spec.head == "lm" else load_value_model(spec).to(device).eval()


def load_value_model(spec: ModelSpec) -> Any:
    """A critic of a causal language model, or of a classifier with one label. Raises `ModelError`."""
    from transformers import AutoModelForCausalLM

    causal: Any = AutoModelForCausalLM
    config = config_of(spec, folder_of(spec)).to_dict()
    if fault := value_fault(spec.path, spec.trainable, config):
        raise ModelError(fault.fact, fault.fix)
    if not is_classifier(config):
        return _headed(load_model(spec), spec)
    classifier: Any = load_classifier(spec, "cpu")
    with torch.device("meta"):  # all that is its own is the head, which is replaced
        model = causal.from_config(classifier.config, trust_remote_code=spec.trust_remote_code)
    setattr(model, model.base_model_prefix, getattr(classifier, classifier.base_model_prefix))
    _headed(model, spec).get_output_embeddings().weight.data.copy_(getattr(classifier, SCORE).weight)
    return model


def _headed(model: Any, spec: ModelSpec) -> Any:
    """The model with a value head in the place of its own."""
    own = model.get_output_embeddings()
    head = ValueHead(own.weight.shape[-1]) if own is not None else nn.Identity()
    model.set_output_embeddings(head)
    if model.get_output_embeddings() is not head:
        fact = f"models of type '{model.config.model_type}' have no output layer that a value head could replace"
        raise ModelError(f"'{spec.path}': {fact}")
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False
    return model


def save_value_model(module: Any, spec: ModelSpec, folder: Path) -> None:
    """Write a critic without adapters as a classifier with one label. Raises `ModelError` where there is none."""
    from transformers import AutoModelForSequenceClassification

    kinds: Any = AutoModelForSequenceClassification
    module.config.num_labels = 1
    try:
        with torch.device("meta"):
            classifier = kinds.from_config(module.config, trust_remote_code=spec.trust_remote_code)
    except ValueError as error:
        fact = f"models of type '{module.config.model_type}' have no sequence classifier to write a value head as"
        raise ModelError(f"'{spec.path}': {fact}") from error
    setattr(classifier, classifier.base_model_prefix, getattr(module, module.base_model_prefix))
    getattr(classifier, SCORE).weight = module.get_output_embeddings().weight
    classifier.save_pretrained(folder)
