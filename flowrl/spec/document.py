"""The document: Pydantic models of every section. Defaults live here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from flowrl.data.arithmetic import Arithmetic
from flowrl.data.base import NAME_PATTERN, Name, Text
from flowrl.data.hf import Hf
from flowrl.data.jsonl import Jsonl
from flowrl.data.mixture import Mixture
from flowrl.data.parquet import Parquet
from flowrl.data.python import Python
from flowrl.data.reasoning_gym import ReasoningGym
from flowrl.model import OPTIMIZER_PATTERN, LoraSpec, ModelSpec, OptimizerSpec, SettingError, Settings
from flowrl.spec.tracking import NoTracking, Tracking, TrackingSpec

_PIPELINE_NAME = r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"
PATTERNS: Mapping[str, str] = {
    NAME_PATTERN: "begin with a letter or _, and go on with letters, digits, _ and -",
    _PIPELINE_NAME: "begin with a letter, a digit or _, and go on with letters, digits, ., _ and -",
    OPTIMIZER_PATTERN: "adamw, or an import path such as torch.optim:SGD",
}
"""What to write for a value that must match one of the document's patterns."""

FieldName = Text
"""Name of a field: a node's output, or a column of the data."""


class BatchSpec(Settings):
    """How much one training step holds."""

    prompts: int = Field(ge=1)
    """P: prompts of a step, each of them a group."""
    group: int = Field(ge=1)
    """n: samples of each prompt."""


class PoolSpec(Settings):
    """Workers that nodes run on."""

    workers: int = Field(default=1, ge=1)
    """Number of workers: one per accelerator where the nodes need one and CUDA exists, else CPU workers."""
    nodes: int | None = Field(default=None, ge=1)
    """Machines to spread the workers over; null leaves it to Ray."""
    cpus_per_worker: float | None = Field(default=None, ge=0)
    """CPUs to reserve for a worker; null means 1 where a model lives, else 0. Fractions are allowed."""
    threads_per_worker: int | None = Field(default=None, ge=1)
    """Threads that a worker computes with; null shares this machine's cores out between all that hold models."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Further Ray resources of a worker, by name."""
    memory_per_worker: float | None = Field(default=None, gt=0)
    """GiB that the models of one worker may fill, such as 80 for an H100; null leaves memory unchecked."""
    shares: str | None = None
    """Name of another pool whose workers this pool uses."""

    @model_validator(mode="after")
    def _shared_pool_has_no_size(self) -> Self:
        own = PoolSpec.model_construct(shares=self.shares)
        if self.shares is not None and self != own:
            fact = f"a pool that shares '{self.shares}' uses its workers and takes no other setting"
            others = [key for key in PoolSpec.model_fields if getattr(self, key) != getattr(own, key)]
            raise SettingError(
                ("shares", *others), fact, "remove the others, or for workers of its own write shares: null"
            )
        return self


class NodeSpec(Settings):
    """One node: the engine's keys, and beside them the parameters of its class."""

    model_config = ConfigDict(extra="allow")

    use: str = Field(min_length=1)
    """Library name (`reward.exact_match`), import path (`my_pkg.nodes:Mine`) or file (`./my_nodes.py:Mine`)."""
    model: str | None = None
    """Name of the model whose weights the node uses."""
    pool: str | None = None
    """Name of the pool it runs on; null is the built-in CPU pool."""
    reads: dict[str, FieldName | list[FieldName]] = Field(default_factory=dict)
    """Field that a port reads, where it is not the field of the port's name; a list port takes several."""
    writes: dict[str, FieldName] = Field(default_factory=dict)
    """Field that an output is written to, where it is not the field of the output's name."""
    every: int = Field(default=1, ge=1)
    """Run in every so many-th step."""
    gate: str | None = None
    """Field of type Prompt[bool], written by this node: which groups to keep. What it depends on runs again until the
    batch is full, and what comes after sees only the groups kept."""
    tags: list[str] = Field(default_factory=list)
    """Free words for views and filters."""
    on_error: Literal["fail", "drop", "retry", "unscored"] | None = None
    """What becomes of a failed sample; null means unscored for rewards, drop for rollout, else fail."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds that one call may take, or one row where rows run alone; null is 30 s for a row, else no limit."""

    @property
    def params(self) -> dict[str, Any]:
        """The parameters of the node's class, not yet checked."""
        return dict(self.model_extra or {})


class SyncSchedule(Settings):
    """Roll out, train, sync, in turn."""

    mode: Literal["sync"] = "sync"
    """Schedule."""
    together: ClassVar[bool | None] = None
    """Whether rollout and training must have the same workers, or must not; None where it does not matter."""


class AsyncSchedule(Settings):
    """What the asynchronous schedules have in common."""

    warmup_batches: int = Field(default=1, ge=0)
    """Batches of prompts in flight beyond the first."""
    max_staleness: int = Field(default=1, ge=0)
    """Most versions that a trained token may be behind."""
    stale: Literal["drop", "wait"] = "drop"
    """What becomes of a group that would be too old: dropped and replaced, or waited for."""
    max_restarts: int = Field(default=3, ge=0)
    """How often a prompt is tried again whose group was dropped for its age or had no end within its timeout; from the
    second time on its age is waited for."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Prompts in flight; null is batch.prompts x (1 + the smaller of warmup_batches and max_staleness)."""


class ColocateAsyncSchedule(AsyncSchedule):
    """Rollout and training take turns on the same workers; unfinished requests go on under new weights."""

    mode: Literal["colocate_async"] = "colocate_async"
    """Schedule."""
    together: ClassVar[bool | None] = True


class SeparateAsyncSchedule(AsyncSchedule):
    """Rollout and training run at the same time on workers of their own."""

    mode: Literal["separate_async"] = "separate_async"
    """Schedule."""
    together: ClassVar[bool | None] = False
    updates_per_sync: int = Field(default=1, ge=1)
    """Batches trained between two weight syncs."""


class SamplesSpec(Settings):
    """Which trajectories are kept for people to read, as a table in the run folder and with the trackers."""

    rows: int = Field(default=32, ge=0)
    """Trajectories of a step, in whole groups; 0 keeps none."""
    every: int = Field(default=10, ge=1)
    """Steps between two tables; the first step has one too."""


class RunSpec(Settings):
    """One run of the pipeline."""

    steps: int = Field(default=100, ge=1)
    """Training steps."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Everything drawn by chance follows from it."""
    dir: str = Field(default="runs", min_length=1)
    """Folder for run folders, relative to where the command is given."""
    prune: bool = False
    """Leave out the nodes that nobody needs, and the models that only they use."""
    strict_io: bool = False
    """Check every output of a node against its type."""
    max_failed: float = Field(default=0.9, ge=0, le=1)
    """The run stops when a greater share of a step's rows fails in a node that leaves failed rows without a value."""
    samples: SamplesSpec = SamplesSpec()
    """Trajectories to keep for people to read."""


class CheckpointSpec(Settings):
    """When to save, and whether to go on from what was saved."""

    every: int = Field(default=50, ge=1)
    """Steps between two checkpoints; the last step is saved too."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints to keep."""
    resume: Literal["auto", "never"] | Text = "auto"
    """`auto` goes on with the last run of the same name and settings if it did not finish, `never` starts anew; any
    other text is the folder or the name of a run, or the folder of one of its checkpoints, to go on from."""


DataSpec = Annotated[Arithmetic | Jsonl | Parquet | Hf | ReasoningGym | Python | Mixture, Field(discriminator="type")]
ScheduleSpec = Annotated[SyncSchedule | ColocateAsyncSchedule | SeparateAsyncSchedule, Field(discriminator="mode")]


def _as_list(value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        raise ValueError(f"write {{type: {value}}}, for a tracker takes settings of its own")
    return [value] if isinstance(value, (Mapping, Settings)) else value


def _no_tracking() -> list[Tracking]:
    return [NoTracking()]


class Document(Settings):
    """A whole pipeline."""

    flowrl: int = Field(ge=1, le=1)
    """Version of the document's format."""
    name: str = Field(pattern=_PIPELINE_NAME, max_length=100)
    """Name of the pipeline; run folders are named after it."""
    params: dict[Name, Any] = Field(default_factory=dict)
    """Values that `$name` stands for elsewhere in the document."""
    models: dict[Name, ModelSpec] = Field(default_factory=dict)
    """Models by name."""
    data: dict[Name, DataSpec]
    """Data sets by name; `train` is what the run trains on."""
    batch: BatchSpec
    """Size of a step."""
    pools: dict[Name, PoolSpec] = Field(default_factory=dict)
    """Pools of workers by name."""
    nodes: dict[Name, NodeSpec] = Field(min_length=1)
    """Nodes by name; their order means nothing."""
    schedule: ScheduleSpec = SyncSchedule()
    """What may run next."""
    run: RunSpec = RunSpec()
    """Length, seed and folder of the run."""
    tracking: Annotated[
        list[TrackingSpec], BeforeValidator(_as_list, json_schema_input_type=TrackingSpec | list[TrackingSpec])
    ] = Field(default_factory=_no_tracking)
    """Trackers beside the run folder, one or a list."""
    checkpoint: CheckpointSpec | None = None
    """Checkpoints; null saves none."""

    @property
    def decides_prompts_in_flight(self) -> str:
        """The settings to lower where there are fewer prompts."""
        schedule = self.schedule
        if isinstance(schedule, SyncSchedule):
            return "batch.prompts"
        if schedule.max_in_flight:
            return "schedule.max_in_flight, and with it batch.prompts"
        fewest = min(("warmup_batches", "max_staleness"), key=lambda key: int(getattr(schedule, key)))
        return f"batch.prompts or schedule.{fewest}" if getattr(schedule, fewest) else "batch.prompts"

    @property
    def updates_per_sync(self) -> int:
        """Batches that one step trains before it syncs."""
        return self.schedule.updates_per_sync if isinstance(self.schedule, SeparateAsyncSchedule) else 1

    @property
    def max_staleness(self) -> int:
        """Most versions that a trained token may be behind."""
        return self.schedule.max_staleness if isinstance(self.schedule, AsyncSchedule) else 0

    @property
    def prompts_in_flight(self) -> int:
        """Prompts that the schedule keeps in flight."""
        schedule = self.schedule
        if isinstance(schedule, SyncSchedule):
            return self.batch.prompts
        ahead = min(schedule.warmup_batches, schedule.max_staleness)
        return schedule.max_in_flight or self.batch.prompts * (1 + ahead)

    @field_validator("data")
    @classmethod
    def _has_training_data(cls, data: dict[str, DataSpec]) -> dict[str, DataSpec]:
        if "train" not in data:
            raise PydanticCustomError("missing_key", "train is missing", {"key": "train"})
        return data


SECTIONS: Mapping[str, type[Settings]] = {
    "run": RunSpec,
    "batch": BatchSpec,
    "models.<name>": ModelSpec,
    "models.<name>.optimizer": OptimizerSpec,
    "models.<name>.lora": LoraSpec,
    "pools.<name>": PoolSpec,
    "nodes.<name>": NodeSpec,
    "schedule": SyncSchedule,
    "a schedule of mode colocate_async or separate_async": AsyncSchedule,
    "a schedule of mode separate_async": SeparateAsyncSchedule,
    "checkpoint": CheckpointSpec,
    "run.samples": SamplesSpec,
    "the document itself": Document,
    **{f"data.<name> of type {one.model_fields['type'].default}": one for one in get_args(get_args(DataSpec)[0])},
    **{f"tracking of type {one.model_fields['type'].default}": one for one in get_args(Tracking) if one != NoTracking},
}
"""Every section by name, for telling where a misplaced key belongs; the first that has a key wins."""


@cache
def homes() -> Mapping[str, str]:
    """For each key of the document, the section where it belongs."""
    found: dict[str, str] = {}
    for section, model in SECTIONS.items():
        for key in model.model_fields:
            found.setdefault(key, section)
    return found
