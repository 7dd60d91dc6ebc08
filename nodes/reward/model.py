"""A reward model: a sequence classifier on a pool of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, PrivateAttr

from flowrl.batch import Json, Prompt, Sample
from flowrl.node import Context, Node
from flowrl.nodes._backend.answers import scored
from flowrl.partition import micro_batches, shards
from flowrl.rows import Array


class Model(Node):
    """Score each response with a frozen sequence classifier, which reads prompt and response as its chat template says.

    A sample that is too long for it stays without a score.
    """

    weights = "reads"
    device = "accelerator"
    toy_model = str(Path(__file__).parents[1] / "_backend" / "toy_classifier")

    label: int | None = Field(None, ge=0)
    """Of a classifier with several labels: the one that is wanted. With one label, or null, its logit is the score."""
    output: Literal["logit", "probability"] = "logit"
    """The logit, of several labels the log-odds of the one wanted; or the probability."""
    max_tokens_per_microbatch: int = Field(8192, ge=1)
    """Padded tokens of one forward pass; bounds memory and changes no value."""

    _context: Context = PrivateAttr()
    _model: Any = PrivateAttr()
    _tokenizer: Any = PrivateAttr()

    class Out(NamedTuple):
        reward: Sample[float]

    def setup(self, context: Context) -> None:
        from flowrl.nodes._backend.classifier import load_classifier
        from flowrl.nodes._backend.models import load_tokenizer, shared, use_threads

        use_threads(context)
        spec = context.model_spec
        self._context, self._tokenizer = context, load_tokenizer(spec)
        self._model = shared(context, "classifier", lambda: load_classifier(spec, context.device))
        num_labels = int(self._model.config.num_labels)
        if num_labels > 1 and (self.label is None or self.label >= num_labels):
            names = ", ".join(f"{index} ({name})" for index, name in sorted(self._model.config.id2label.items()))
            raise ValueError(f"'{spec.path}' has {num_labels} labels: set `label` to one of {names}")
        if num_labels == 1 and self.label:
            raise ValueError(f"'{spec.path}' has one label: leave `label` out")

    def run(self, response: Sample[str], prompt: Prompt[Json]) -> Out:
        from flowrl.nodes._backend.classifier import logits_of

        # Texts are cheap to count in characters, and every rank must find the same shares.
        texts, prompts = list(response), list(prompt.per_sample(response))
        sizes = np.array([len(str(ask)) + len(text) for ask, text in zip(prompts, texts, strict=True)], dtype=np.int64)
        own = np.flatnonzero(shards(sizes, self._context.num_ranks) == self._context.rank)
        rows = response.rows.take(own)
        encoded = scored(rows, lambda position: self._encoded(prompts[own[position]], texts[own[position]]))
        readable = [position for position, ids in enumerate(encoded) if ids is not None]
        costs = np.array([len(encoded[position] or ()) for position in readable], dtype=np.int64)
        scores = np.full(len(own), np.nan)
        for batch in micro_batches(costs, self.max_tokens_per_microbatch):
            index = [readable[position] for position in batch]
            scores[index] = self._scores(logits_of(self._model, [encoded[position] or () for position in index]))
        return self.Out(Sample(rows, scores))

    def _encoded(self, prompt: Any, response: str) -> list[int]:
        from flowrl.nodes._backend.classifier import encode_dialogue, max_length

        ids = encode_dialogue(self._tokenizer, prompt, response)
        if len(ids) > max_length(self._model):
            raise ValueError(
                f"prompt and response have {len(ids)} tokens, the reward model reads {max_length(self._model)}"
            )
        return ids

    def _scores(self, logits: Array) -> Array:
        """(N,) from (N, labels): the wanted label's log-odds, of which a single logit is one already."""
        values = logits.astype(np.float64)
        wanted = values[:, 0]
        if values.shape[1] > 1:
            assert self.label is not None, "setup has seen to it"
            others = np.delete(values, self.label, axis=1)
            wanted = values[:, self.label] - np.logaddexp.reduce(others, axis=1)
        scores: Array = wanted if self.output == "logit" else 1 / (1 + np.exp(-wanted))
        return scores
