"""Checks of names: models and pools that nodes use (FR007, FR010, FR012, FR019, FR053)."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator

from flowrl.errors import Problem, nearest
from flowrl.graph.bind import CPU_POOL
from flowrl.graph.build import DATA
from flowrl.graph.subject import Subject
from flowrl.registry import shipped_models


def model_folder(subject: Subject) -> Iterator[Problem]:
    """FR010: a model that is named as a folder must be there; other names may be shipped ones or hub ids."""
    shipped = shipped_models()
    told: set[tuple[str, str]] = set()
    for name, model in subject.document.models.items():
        place = subject.place("models", name, "path")
        if (str(place), model.path) in told:
            continue  # a param that several models take
        told.add((str(place), model.path))
        a_name = "/" not in model.path and model.path not in shipped  # a hub id belongs to somebody: me/arith-tiny
        if a_name and difflib.get_close_matches(model.path, shipped, n=1, cutoff=0.8):
            yield Problem("FR010", place, f"models.{name}: no shipped model is called '{model.path}'",
                          nearest(model.path, shipped))  # fmt: skip
        if os.path.isabs(model.path) and not os.path.isdir(model.path):
            yield Problem("FR010", place, f"models.{name}: there is no folder '{model.path}'",
                          "path: a shipped name such as arith-tiny, a folder, or a hub id")  # fmt: skip


def reserved_name(subject: Subject) -> Iterator[Problem]:
    """FR007: `data` is what the training data is called in the graph."""
    if DATA in subject.bound.nodes:
        yield Problem("FR007", subject.place("nodes", DATA, key=True),
                      f"nodes.{DATA}: '{DATA}' is the training data, which no node can be", "another name")  # fmt: skip


def unknown_model(subject: Subject) -> Iterator[Problem]:
    """FR010: a node's model is one of those under `models:`."""
    known = subject.names("models")
    if subject.reading.is_broken(("models",)):
        return
    for node in subject.nodes:
        if node.model is not None and node.model not in known:
            yield Problem("FR010", subject.place("nodes", node.name, "model"),
                          f"nodes.{node.name} uses model '{node.model}', which is not under models:",
                          nearest(node.model, subject.document.models)
                          or f"models: {{{node.model}: {{path: ...}}}}")  # fmt: skip


def needless_or_missing_model(subject: Subject) -> Iterator[Problem]:
    """FR019: a node that works on weights names a model, and no other does."""
    for node in subject.nodes:
        path = ("nodes", node.name)
        if node.weights is not None and node.model is None and not subject.reading.is_broken((*path, "model")):
            yield Problem("FR019", subject.place(*path, key=True),
                          f"nodes.{node.name} ({node.use}) works on a model but names none",
                          f"model: {next(iter(subject.document.models), 'NAME')}")  # fmt: skip
        if node.weights is None and node.model is not None:
            yield Problem("FR019", subject.place(*path, "model", key=True),
                          f"nodes.{node.name} ({node.use}) works on no model", "remove `model:`")  # fmt: skip


def unknown_pool(subject: Subject) -> Iterator[Problem]:
    """FR012: a node's pool is one of those under `pools:`, or the built-in one."""
    known = {CPU_POOL, *subject.names("pools")}
    if subject.reading.is_broken(("pools",)):
        return
    for node in subject.nodes:
        if node.spec.pool is not None and node.spec.pool not in known and node.weights != "syncs":
            add = "" if len(known) > 1 else f"pools: {{{node.spec.pool}: {{workers: 1}}}}"
            yield Problem("FR012", subject.place("nodes", node.name, "pool"),
                          f"nodes.{node.name} runs on pool '{node.spec.pool}', which is not under pools:",
                          add or nearest(node.spec.pool, known))  # fmt: skip


def sync_with_a_pool(subject: Subject) -> Iterator[Problem]:
    """FR053: where a weight sync runs follows from its model."""
    for node in subject.nodes:
        if node.spec.pool is not None and node.weights == "syncs":
            yield Problem("FR053", subject.place("nodes", node.name, "pool", key=True),
                          f"nodes.{node.name} takes no pool: a weight sync spans the pool of the update and every pool "
                          "that generates with the model", "remove `pool:`")  # fmt: skip


def failure_policy(subject: Subject) -> Iterator[Problem]:
    """FR007: what `on_error` asks for must be possible for this kind of node."""
    for node in subject.nodes:
        asked, scores = node.spec.on_error, node.cls.scores_rows()
        allowed = {"fail"} | ({"unscored", "drop"} if scores else set())
        allowed |= {"drop"} if node.weights == "generates" else set()
        allowed |= {"retry"} if node.cls.pure and node.weights in (None, "generates") else set()
        if asked is not None and asked not in allowed:
            yield Problem("FR007", subject.place("nodes", node.name, "on_error"),
                          f"nodes.{node.name} ({node.use}) cannot have on_error: {asked}",
                          "on_error: " + " | ".join(sorted(allowed)))  # fmt: skip
