"""The node: a Pydantic class whose fields are parameters, whose `run` hints are reads, and whose `Out` are writes.

    class LengthPenalty(Node):
        budget: int = 1024

        class Out(NamedTuple):
            shaped_reward: Sample[float]

        def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
            return self.Out(reward - response_mask.sum("sample") / self.budget)

A node is light to make (parameters are checked, nothing is loaded), heavy in `setup`, and typed in `run`. It works
without an engine: `LengthPenalty(budget=8).run(...)`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict

from flowrl.errors import NodeDefinitionError
from flowrl.fields import Port
from flowrl.model import Head, ModelSpec, Settings
from flowrl.ports import read_ports, write_ports

ENGINE_KEYS = frozenset({"use", "model", "pool", "reads", "writes", "every", "gate", "tags", "on_error", "timeout"})

Scope = Literal["sample", "group", "batch", "step"]
Weights = Literal["reads", "updates", "syncs", "generates"]
Cardinality = Literal["keeps", "filters", "expands"]
Device = Literal["cpu", "accelerator"]
_ALLOWED: Mapping[str, tuple[object, ...]] = {
    "scope": get_args(Scope),
    "weights": (*get_args(Weights), None),
    "cardinality": get_args(Cardinality),
    "pure": (False, True),
    "device": get_args(Device),
    "head": get_args(Head),
    "compares_samples": (False, True),
    "takes_shards": (False, True),
}
"""The class attributes that say what kind of node it is, with the values that they take."""


CYCLE = "cycle"
"""Where a worker says, to all its nodes, which step it works for."""


@dataclass
class Context:
    """What a worker gives a node in `setup`."""

    node: str = ""
    """Name of the node in the pipeline."""
    model: str | None = None
    """Name of the model that the node uses."""
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    """All models of the pipeline."""
    rank: int = 0
    """Position of this worker in its pool."""
    num_ranks: int = 1
    """Workers of the pool."""
    device: str = "cpu"
    """Device string, such as `cpu` or `cuda:0`."""
    seed: int = 0
    """Seed of the run."""
    num_threads: int = 1
    """CPU threads that this worker may use for computing."""
    shared: dict[Any, Any] = field(default_factory=dict)
    """Objects that the nodes of this worker share, such as loaded models."""
    reads: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The fields that each port reads."""
    timeout: float | None = None
    """Seconds that one call may take, or one row where rows are scored alone; None is no limit."""
    trained: Collection[str] = ()
    """Models that a node of this worker updates."""
    optimizer_steps: Mapping[str, int] = field(default_factory=dict)
    """Optimizer steps that each trained model takes in the whole run, where every mini-batch takes one."""
    updates_per_sync: int = 1
    """Batches that are trained between two weight syncs."""

    @property
    def cycle(self) -> int | None:
        """The step that the running call of a node that reads or updates weights trains; None in a validation."""
        found: int | None = self.shared.get(CYCLE)
        return found

    @property
    def num_optimizer_steps(self) -> int:
        """Of the node's model; 0 where nobody has counted them."""
        return self.optimizer_steps.get(self.model or "", 0)

    @property
    def model_spec(self) -> ModelSpec:
        """The settings of the node's model."""
        assert self.model is not None, f"node '{self.node}' uses no model"
        return self.models[self.model]


class Node(Settings):
    """Base of every node. See the module docstring; `docs/nodes.md` explains the class attributes."""

    model_config = ConfigDict(validate_default=True)

    scope: ClassVar[Scope] = "sample"
    """How much a call needs: blocks of samples, blocks of whole groups, the batch of the schedule, the whole step."""
    weights: ClassVar[Weights | None] = None
    """What the node does with its model's weights."""
    cardinality: ClassVar[Cardinality] = "keeps"
    """Whether rows stay the same, become fewer, or are new (then `Out` starts with `Rows`)."""
    pure: ClassVar[bool] = True
    """May run again after a failure."""
    device: ClassVar[Device] = "cpu"
    """Which pools are allowed."""
    head: ClassVar[Head] = "lm"
    """Of a node that works on weights: what its model must say of tokens (`head:` of a model)."""
    compares_samples: ClassVar[bool] = False
    """Compares a sample with the others of its group, so that a group of one carries no signal."""
    takes_shards: ClassVar[bool] = False
    """Of a node that reads or updates: works on a share of the weights (`parallel: fsdp2`), and so calls its model as
    often on every rank."""
    corrections: ClassVar[Mapping[str, str]] = {}
    """Optional ports that make up for the age of samples, and a node that writes what each reads, as a line of YAML:
    where one of them is read, `max_staleness` is no bound."""
    toy_model: ClassVar[str] = "arith-tiny"
    """Model, by name or folder, with which a node that uses one can be tried on toy batches."""
    input_ports: ClassVar[Mapping[str, Port]] = {}
    """Ports of `run`; filled in by the class definition."""
    output_ports: ClassVar[Mapping[str, Port]] = {}
    """Ports of `Out`; filled in by the class definition."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        hints = inspect.get_annotations(cls)
        for name, allowed in _ALLOWED.items():
            if "ClassVar" not in str(hints.get(name, "ClassVar")):
                raise NodeDefinitionError(
                    f"{cls.__name__}: '{name}' is a class attribute, not a parameter; write `{name} = ...` without a "
                    f"hint, or `{name}: ClassVar[...] = ...`"
                )
            if getattr(cls, name) not in allowed:
                listed = ", ".join(map(repr, allowed))
                raise NodeDefinitionError(f"{cls.__name__}: {name} must be one of {listed}, not {getattr(cls, name)!r}")
        _check_parameters(cls, [name for name, hint in hints.items() if "ClassVar" not in str(hint)])
        super().__init_subclass__(**kwargs)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if "run" in cls.__dict__:
            cls.input_ports = read_ports(cls)
        if "Out" in cls.__dict__:
            cls.output_ports, has_rows = write_ports(cls)
            if has_rows != (cls.cardinality == "expands"):
                raise NodeDefinitionError(
                    f"{cls.__name__}: a node with cardinality 'expands' returns Rows as the first member of Out, "
                    "and only such a node does"
                )

    def needs(self) -> dict[str, bool]:
        """For optional ports that a setting switches: whether `run` needs them. Others are bound when written."""
        return {}

    def active_ports(self) -> Mapping[str, Port]:
        """The ports of `run` that these settings may read."""
        needs = self.needs()
        return {name: port for name, port in self.input_ports.items() if needs.get(name, True)}

    def refuses(self, reads: Mapping[str, tuple[str, ...]], num_prompts: int, max_staleness: int = 0) -> str:
        """Why these settings do not go with the fields that the ports read, or with what the schedule hands over.

        That is so many prompts from one weight sync to the next, in one batch or several, whose samples may be so many
        versions old. Empty when all is well; asked before launch. `reads` lacks optional ports that nobody writes to.
        """
        return ""

    def refuses_writers(self, writers: Mapping[str, Node]) -> str:
        """Why these settings do not go with those of the nodes that write, by port, what is read; empty if they do.

        Asked before launch. Ports that read the data are left out.
        """
        return ""

    def lacks(self) -> Mapping[str, str]:
        """By setting, what it needs and this machine lacks: a warning of a check; refused where workers start here."""
        return {}

    def refuses_placement(self, trains_on: str, generates_on: Sequence[str], accelerators: bool | None = None) -> str:
        """Of a sync: why it cannot carry weights from one pool to the pools that generate with them; empty if it can.

        Asked before launch; then `accelerators` says whether the machines have any, and is None for a mere check.
        """
        return ""

    def also_reads(self) -> Mapping[str, str]:
        """By setting, the name of a frozen model that the node computes with beside its own, on the same workers."""
        return {}

    def max_staleness(self) -> float:
        """How many versions older than the weights a sample may be for `run` to be right, without `corrections`."""
        return math.inf

    def setup(self, context: Context) -> None:
        """Load what `run` needs; called once per worker. Keep it in attributes that start with `_`."""

    def close(self) -> None:
        """End the processes and free the devices that `setup` took; called once, when the run ends."""

    def prompt_lengths(self, model: ModelSpec, prompts: Sequence[Any]) -> Sequence[int] | None:
        """Of a node that generates: the tokens of each prompt as it will read it; None where it cannot tell.

        Asked before launch, without `setup`: of the first prompt, which may show that the model or its template cannot
        be used, and of all where the data limits them. A prompt is a string or chat messages.
        """
        return None

    def workers_per_copy(self) -> int:
        """Of a node that generates: neighbouring workers of its pool that share one copy of the model."""
        return 1

    def sessions_of(self, group: int) -> int:
        """Of a node that generates: the sessions that it makes of each prompt, where `batch.group` says so many."""
        return group

    def sleep(self) -> None:
        """Leave the device's memory to others until `wake`.

        On shared workers nodes that generate sleep while others compute with a model, and the other way round.
        """

    def wake(self) -> None:
        """Be ready again; of a node that generates: under the weights of the last sync."""

    def abort(self, uids: Collection[str]) -> None:
        """Of a node that generates: end these groups at once, from another thread than the one that runs the node.

        Their unfinished sessions are left out of what it returns, and are no failures.
        """

    def rows_per_call(self) -> int:
        """Of a node whose rows are scored alone: how many `run` takes at once, where that is cheaper.

        It may yield them as they are done, and keeps each to the context's `timeout`. A call that fails is tried again
        row by row.
        """
        return 1

    def changed(self) -> bool:
        """Of an update: whether its last call changed any weight; if not, there is nothing to sync."""
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to go on from here: nested mappings and lists of tensors and picklable values.

        That of an update is one for all ranks of its pool: the same on each, or sharded. The tensors of a new node are
        filled in place; `load_state` follows. A node whose rows are scored alone is not asked.
        """
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` returned."""

    def export(self, state: dict[str, Any], model: ModelSpec, folder: str, adapter: bool) -> None:
        """Of an update: write its model, with the weights of a state, as a Hugging Face folder; needs no `setup`.

        With `adapter` only what was trained beside a frozen base. `flowrl export` calls it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how its model is written")

    @classmethod
    def scores_rows(cls) -> bool:
        """Whether rows are judged one by one and may stay without a value: then one bad row hurts no other."""
        return (
            cls.scope == "sample"
            and cls.weights in (None, "reads")
            and cls.pure
            and cls.cardinality == "keeps"
            and bool(cls.output_ports)
            and all(port.type.axis == "Sample" and port.type.nullable for port in cls.output_ports.values())
        )

    @classmethod
    def scores_alone(cls, on_error: str) -> bool:
        """Whether, under this policy for failures, each row runs alone in a process that can be killed."""
        return cls.scores_rows() and cls.weights is None and on_error in ("unscored", "drop")


_RESERVED = frozenset(dir(BaseModel)) | frozenset(dir(Node)) | ENGINE_KEYS


def _check_parameters(cls: type[Node], names: Iterable[str]) -> None:
    for name in names:
        if name in _RESERVED or name.startswith("model_"):
            what = "an engine key" if name in ENGINE_KEYS else "an attribute of every node"
            what = "a name in model_, which Pydantic reserves" if name.startswith("model_") else what
            raise NodeDefinitionError(f"{cls.__name__}: parameter '{name}' is {what}; give it another name")
