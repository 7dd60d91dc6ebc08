"""Checks of who may change a model's weights, and who must hear of it (FR023 to FR025, FR027, FR033, FR056)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.errors import Problem
from flowrl.graph.bind import BoundNode, raised
from flowrl.graph.pools import physical_name
from flowrl.graph.subject import Subject
from flowrl.spec.read import Reading


def other_head(subject: Subject) -> Iterator[Problem]:
    """FR033: a critic says no words, and a language model no values."""
    models = subject.document.models
    for name, model in models.items():
        nodes = [node for node in subject.nodes if name in node.models and node.weights is not None]
        wrong = [node for node in nodes if node.cls.head != model.head]
        if not wrong or subject.reading.is_broken(("models", name, "head")):
            continue
        wanted = wrong[0].cls.head
        if len(wrong) == len(nodes):  # one mistake, in the model
            listed = ", ".join(f"nodes.{node.name} ({node.use})" for node in wrong)
            said = "head" in model.model_fields_set
            yield Problem("FR033", subject.place("models", name, *["head"] * said, key=not said),
                          f"models.{name} has head: {model.head}, but {listed} need{'s' * (len(wrong) == 1)} "
                          f"head: {wanted}", f"models.{name}: {{head: {wanted}}}")  # fmt: skip
            continue
        other = next((other for other, spec in models.items() if spec.head == wanted), "")
        for node in wrong:
            key = next((key for key, read in node.also_reads.items() if read == name), "model")
            yield Problem("FR033", subject.place("nodes", node.name, key),
                          f"nodes.{node.name} ({node.use}) needs a model with head: {wanted}, but models.{name} has "
                          f"head: {model.head}", f"{key}: {other}" if other else
                          f"model: critic, and models: {{critic: {{path: {model.path}, head: {wanted}}}}}"
                          )  # fmt: skip


def rollout_without_sync(subject: Subject) -> Iterator[Problem]:
    """FR023: a trained model that generates needs a weight sync."""
    if "syncs" in subject.lost_roles:
        return
    for name in _unsynced(subject)[len(_astray(subject)) :]:
        updates = subject.of_role(name, "updates")
        for rollout in subject.of_role(name, "generates"):
            yield Problem("FR023", subject.place("nodes", rollout.name, key=True),
                          f"nodes.{rollout.name} generates with model '{name}', which {updates[0].name} trains, "
                          "but no node syncs its weights: it would generate with the first weights for ever",
                          _sync_fix(subject, name))  # fmt: skip


def _unsynced(subject: Subject) -> list[str]:
    """Models that a node trains and another generates with, and that no node syncs."""
    return [
        name
        for name in subject.document.models
        if all(subject.of_role(name, role) for role in ("updates", "generates"))
        and not subject.of_role(name, "syncs")
        and subject.document.models[name].head == "lm"
    ]


def _astray(subject: Subject) -> list[BoundNode]:
    """Syncs of models that no node trains, and of critics: each may be meant for one that has none."""
    models = subject.document.models
    found = [name for name, model in models.items() if model.head == "value" or not subject.of_role(name, "updates")]
    return [sync for name in found for sync in subject.of_role(name, "syncs")]


def _sync_fix(subject: Subject, model: str) -> str:
    """A new sync, or the one that `--to-nodes` has cut off."""
    cut = [node.name for node in subject.declared if node.model == model and node.weights == "syncs"]
    return f"--to-nodes {cut[0]}" if cut else f"weight_sync: {{use: sync.weights, model: {model}}}"


def frozen_update(subject: Subject) -> Iterator[Problem]:
    """FR024: only a trainable model can be updated."""
    for name, model in subject.document.models.items():
        if model.trainable or subject.reading.is_broken(("models", name, "trainable")):
            continue
        said = "trainable" in model.model_fields_set
        for update in subject.of_role(name, "updates"):
            place = ("models", name, "trainable") if said else ("nodes", update.name, "model")
            yield Problem("FR024", subject.place(*place),
                          f"nodes.{update.name} updates model '{name}', which is frozen",
                          f"models.{name}: {{trainable: true}}")  # fmt: skip


def second_of_its_kind(subject: Subject) -> Iterator[Problem]:
    """FR025: a model has one update and one weight sync."""
    for name in subject.document.models:
        for role, shown in (("updates", "update"), ("syncs", "weight sync")):
            found = [
                node for node in subject.of_role(name, role) if node.cls.head == subject.document.models[name].head
            ]
            for extra in found[1:]:
                yield Problem("FR025", subject.place("nodes", extra.name, key=True),
                              f"nodes.{extra.name} is a second {shown} of model '{name}' beside nodes.{found[0].name}",
                              "keep one of them, or give each a model of its own")  # fmt: skip


Route = tuple[BoundNode, str, Sequence[str]]
"""A sync, the workers that train its model, and those that generate with it."""


def sync_across_pools(subject: Subject) -> Iterator[Problem]:
    """FR056: the way that a sync takes must lead from the pool of the update to those of the engines."""
    pools = subject.document.pools
    routes: list[Route] = []
    for sync in (node for node in subject.nodes if node.weights == "syncs"):
        updates, rollouts = (subject.of_role(sync.model, role) for role in ("updates", "generates"))
        names = [physical_name(pools, node.pool) for node in (*updates[:1], *rollouts)]
        known = [name for name in names if name is not None]
        if updates and len(known) == len(names):
            routes.append((sync, known[0], sorted(set(known[1:]))))
    return refused_placements(subject.reading, routes)


def refused_placements(
    reading: Reading, routes: Sequence[Route], accelerators: bool | None = None
) -> Iterator[Problem]:
    """FR056 for each sync that refuses its pools, or machines without accelerators."""
    for sync, trains_on, generates_on in routes:
        if sync.node is None:
            continue
        try:
            refusal = sync.node.refuses_placement(trains_on, generates_on, accelerators)
        except Exception as error:  # the class may be a user's
            yield raised(sync.name, sync.cls, error, reading)
            continue
        if refusal:
            given = "transport" in sync.spec.params
            path = ("nodes", sync.name, *["transport"] * given)
            yield Problem("FR056", reading.place(path, key=not given), f"nodes.{sync.name}: {refusal}",
                          "transport: auto")  # fmt: skip


def sync_of_an_untrained_model(subject: Subject) -> Iterator[Problem]:
    """FR027: weights that nothing trains need no sync."""
    models = subject.document.models
    frozen = any(subject.of_role(name, "updates") for name, model in models.items() if not model.trainable)
    if "updates" in subject.lost_roles or frozen:
        return  # an update that is lost, or on the wrong model, may be the one
    unsynced = _unsynced(subject)
    for position, sync in enumerate(_astray(subject)):
        if models[sync.model or ""].head == "value":
            continue  # FR033
        meant = f"model: {unsynced[position]}" if position < len(unsynced) else ""
        yield Problem("FR027", subject.place("nodes", sync.name, *["model"] * bool(meant), key=not meant),
                      f"nodes.{sync.name} syncs the weights of model '{sync.model}', which no node trains",
                      meant or f"nodes.{sync.name}: null")  # fmt: skip
