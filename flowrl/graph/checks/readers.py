"""Checks of models that read what another one has generated, and of those that a node reads beside its own.

FR034: the reader must mean the same by a token id. FR035: what is read beside the node's own model does not train.
"""

from __future__ import annotations

from collections.abc import Iterator

from flowrl.errors import Problem
from flowrl.graph.origins import origins_of
from flowrl.graph.sizes.lengths import readers_of_tokens
from flowrl.graph.subject import Subject
from flowrl.graph.vocabulary import difference


def other_vocabulary(subject: Subject) -> Iterator[Problem]:
    """FR034: a model reads token ids of a model with another vocabulary."""
    models, graph = subject.document.models, subject.graph
    told: set[tuple[str, str]] = set()
    for rollout, reader in readers_of_tokens(graph, origins_of(graph)):
        source = graph.nodes[rollout].model if rollout else None
        for name in reader.models if reader.weights != "generates" else ():
            if source is None or (source, name) in told or not {source, name} <= models.keys():
                continue
            told.add((source, name))
            keys = [("models", model, key) for model in (source, name) for key in ("path", "tokenizer")]
            if any(map(subject.reading.is_broken, keys)):
                continue
            if fact := difference(models, source, name):
                key = "path" if models[name].tokenizer is None else "tokenizer"
                yield Problem("FR034", subject.place("models", name, key),
                              f"nodes.{reader.name} has models.{name} read the token ids of nodes.{rollout}, which are "
                              f"other words to it: {fact}",
                              f"give models.{name} a model with the tokenizer of models.{source}")  # fmt: skip


def trained_beside(subject: Subject) -> Iterator[Problem]:
    """FR035: a model that a node reads beside its own trains."""
    models = subject.document.models
    for node in subject.nodes:
        for key, name in node.also_reads.items():
            refused = subject.reading.is_broken(("models", name, "trainable"))
            if name not in models or not models[name].trainable or refused:
                continue
            frozen = [other for other, spec in models.items() if not spec.trainable]
            yield Problem("FR035", subject.place_of(node, key),
                          f"nodes.{node.name} takes models.{name} as its {key}, which may not change, but it is "
                          "trainable",
                          f"{key}: {frozen[0]}" if frozen
                          else f"models: {{{key}: {{path: {models[name].path}}}}}, and {key}: {key}")  # fmt: skip
