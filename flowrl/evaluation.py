"""Validation: a node that judges models on the rows of a data set that nothing trains on.

    nodes:
      accuracy: {use: evaluate.accuracy, dataset: val, every: 20, samples: 4, temperature: 0.6}

In a step in which it is due, after the weight sync, the engine runs whatever the node reads from on all rows of its
data set, and then the node itself, once, on all of them: a walk of its own through the graph, in which nothing trains.
A node whose outputs are read by evaluations alone never sees a training row. See `docs/decisions/validation.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import Field

from flowrl.errors import NodeDefinitionError
from flowrl.node import Node

SAMPLING = ("temperature", "max_tokens")
"""Settings of nodes that generate which an evaluation may have otherwise for its own rows."""


@dataclass(frozen=True)
class Asked:
    """What a validation asks of the nodes that it runs."""

    samples: int
    """Sessions of each row."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Name and value of settings of the nodes that generate, in the place of their own."""


class Evaluation(Node):
    """Base of nodes that judge a model on rows of their own; `run` reports metrics and writes no field.

    Its columns hold every row of the data set; a row all of whose samples failed is a group without trajectories.
    """

    scope = "batch"

    dataset: str = Field("val", min_length=1)
    """Data set whose rows are worked on, all of them, each once."""
    samples: int = Field(1, ge=1)
    """Responses to each row."""
    temperature: float | None = Field(None, ge=0)
    """Temperature for these rows; 0 takes the likeliest token each time, null is that of the node that generates."""
    max_tokens: int | None = Field(None, ge=1)
    """Longest response for these rows, in tokens; null is that of the node that generates."""
    max_rows: int | None = Field(None, ge=1)
    """Take only so many rows, the first ones of the data; null takes all."""
    before_training: bool = False
    """Run before the first step too; its metrics are those of step 0."""
    at_end: bool = False
    """Run after the last step too, whatever `every` says."""
    prefix: str = Field("val", min_length=1)
    """Beginning of the names of its metrics."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.output_ports or cls.scope != "batch" or cls.weights is not None:
            raise NodeDefinitionError(
                f"{cls.__name__}: an evaluation reports metrics about a whole data set: it has no `Out`, no weights, "
                "and the scope 'batch'"
            )

    def asked(self) -> Asked:
        """What it asks of the nodes before it."""
        given = ((name, getattr(self, name)) for name in SAMPLING)
        return Asked(self.samples, tuple((name, value) for name, value in given if value is not None))

    def on(self) -> str:
        """On what it runs, for people: `all rows of data.val, 4 samples each, temperature 0.6`."""
        rows = f"the first {self.max_rows:,} rows" if self.max_rows is not None else "all rows"
        samples = f"{self.samples:,} sample{'s' * (self.samples > 1)} each"
        settings = (f"{name} {value:g}" for name, value in self.asked().settings)
        return ", ".join([f"{rows} of data.{self.dataset}", samples, *settings])

    def due(self, step: int, every: int, num_steps: int) -> bool:
        """Whether it runs after a step; step 0 is the time before training."""
        if step == 0:
            return self.before_training
        return step % every == 0 or (self.at_end and step == num_steps)

    def when(self, every: int) -> str:
        """When it runs, for people: `every 20 steps, before training and at the end`."""
        ends = [text for text, on in (("before training", self.before_training), ("at the end", self.at_end)) if on]
        return ", ".join([f"every {every:,} steps" if every > 1 else "every step", *[" and ".join(ends)] * bool(ends)])
