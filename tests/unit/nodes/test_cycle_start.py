"""Log-probabilities of all batches of a cycle are of the weights that the cycle began with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import Ranks
from trajectories import trajectories

from flowrl.model import LoraSpec, ModelSpec, OptimizerSpec
from flowrl.node import CYCLE, Context
from flowrl.nodes._backend.trainer import Trainer, trainer_of
from flowrl.nodes._backend.transport import stream
from flowrl.nodes.model.logprob import Logprob
from flowrl.nodes.sync.weights import Weights
from flowrl.nodes.update.policy import Policy

LORA = LoraSpec(rank=2, alpha=2)


class Cycles:
    """The nodes of one training worker, and what its engine tells them."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, updates_per_sync: int = 2, **model: Any) -> None:
        # Steps so large that weights before and after cannot be taken for each other; Adam would enlarge rounding.
        optimizer = OptimizerSpec(type="torch.optim:SGD", lr=1.0, max_grad_norm=0.5)
        spec = ModelSpec(path="arith-tiny", trainable=True, optimizer=optimizer, **model)
        self.context = Context(
            model="policy", models={"policy": spec}, rank=rank, num_ranks=num_ranks, trained=("policy",),
            updates_per_sync=updates_per_sync,
        )  # fmt: skip
        self.update, self.logprob, self.sync = Policy(minibatch=4), Logprob(), Weights()
        for node in (self.update, self.logprob, self.sync):
            node.setup(self.context)

    @property
    def trainer(self) -> Trainer:
        return trainer_of(self.context)

    def read(self, cycle: int | None) -> dict[Any, list[float]]:
        """Log-probabilities of this rank's rows, by row, for a call of this cycle or of a validation."""
        self.context.shared[CYCLE] = cycle
        columns = trajectories().columns
        out = self.logprob.run(**{name: columns[name] for name in self.logprob.input_ports})  # type: ignore[arg-type]
        return dict(zip(out.log_probs.rows.keys(), [row.tolist() for row in out.log_probs.jagged], strict=True))

    def train(self, cycle: int, batch: int = 0) -> None:
        """An update of one batch of the cycle."""
        self.context.shared[CYCLE] = cycle
        self.update.run(**trajectories(seed=batch).columns)  # type: ignore[arg-type]

    def sent(self) -> dict[str, Any]:
        """What a sync sends now: empty on other ranks than the first."""
        found: dict[str, Any] = {}
        trainer = self.trainer
        trainer.cycle_start.show(False)
        for part in stream(self.context, trainer.module, [], "auto", 1 << 18, "float32", False):
            found |= {name: array.copy() for name, array in part.arrays.items()}
        return found


def two_cycles(rank: int, num_ranks: int, model: dict[str, Any]) -> dict[str, Any]:
    """Reads and updates of two cycles of three batches, with what a validation reads in between."""
    cycles = Cycles(rank, num_ranks, updates_per_sync=3, **model)
    found: dict[str, Any] = {}
    for cycle in (1, 2):
        for batch in range(3):
            found[f"{cycle}/{batch}"] = cycles.read(cycle)
            cycles.train(cycle, batch)
        found[f"{cycle}/sent"] = cycles.sent()
        found[f"{cycle}/validated"] = cycles.read(None)
    return found


def check(found: dict[str, Any]) -> None:
    """The same weights in all batches of a cycle, the newest ones after it."""
    for cycle in ("1", "2"):
        assert found[f"{cycle}/0"] == found[f"{cycle}/1"] == found[f"{cycle}/2"]
        assert found[f"{cycle}/0"] != found[f"{cycle}/validated"]
    assert found["2/0"] == found["1/validated"]


@pytest.mark.parametrize("model", [{}, {"lora": LORA}], ids=["whole", "lora"])
def test_every_batch_of_a_cycle_is_read_with_the_weights_of_its_start(model: dict[str, Any]) -> None:
    check(two_cycles(0, 1, model))


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "model",
    [{"parallel": "ddp"}, {"parallel": "fsdp2"}, {"parallel": "fsdp2", "lora": LORA}],
    ids=["ddp", "fsdp2", "lora on fsdp2"],
)
def test_two_ranks_read_and_send_what_one_does(model: dict[str, Any], two: Ranks) -> None:
    one, ranks = two_cycles(0, 1, model), two.run(two_cycles, model)
    for rank in ranks:
        check(rank)
    for name, expected in one.items():
        found = ranks[0][name] | ranks[1][name]
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-4, atol=1e-4)


def test_training_goes_on_from_the_newest_weights_whatever_is_read_in_between() -> None:
    alone, read = Cycles(updates_per_sync=2), Cycles(updates_per_sync=2)
    for batch in range(2):
        alone.train(1, batch)
        read.read(1)
        read.train(1, batch)
    assert torch.equal(weights(alone.trainer), weights(read.trainer))


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.module.parameters()])


def test_a_checkpoint_and_a_sync_hold_the_newest_weights_though_a_reader_has_those_of_the_start() -> None:
    cycles = Cycles()
    cycles.train(1)
    newest = weights(cycles.trainer).clone()
    cycles.read(1)
    assert not torch.equal(weights(cycles.trainer), newest)
    state = cycles.trainer.state()
    held = torch.cat([value.flatten() for value in state["weights"].values() if value.is_floating_point()])
    assert torch.equal(torch.sort(held)[0], torch.sort(newest)[0])
    cycles.read(1)
    list(cycles.sync.send([cycles.sync.receiver()]))
    assert torch.equal(weights(cycles.trainer), newest)
    cycles.read(1)
    cycles.trainer.load_state(state)
    assert torch.equal(weights(cycles.trainer), newest)
    assert cycles.read(1) == cycles.read(None), "what was kept is no longer the start of anything"


def test_a_batch_that_was_not_trained_leaves_the_newest_weights_to_the_next() -> None:
    cycles = Cycles()
    cycles.train(1)
    cycles.train(1, 1)
    start = cycles.read(2)
    assert cycles.read(2) == start == cycles.read(None), "no update of cycle 2 yet, and what is kept is of cycle 1"
    cycles.train(2, 1)
    assert cycles.read(2) == start


def test_nothing_is_kept_where_a_cycle_has_one_update_or_no_engine_says_which_it_is() -> None:
    single, unknown = Cycles(updates_per_sync=1), Cycles()
    single.train(1)
    unknown.train(None)  # type: ignore[arg-type]
    for cycles in (single, unknown):
        assert cycles.trainer.cycle_start._other == []
        assert cycles.read(1) == cycles.read(None)


def test_a_reference_that_is_the_base_of_the_policy_never_changes() -> None:
    cycles = Cycles(lora=LORA)
    reference = Logprob()
    models = {**cycles.context.models, "reference": ModelSpec(path="arith-tiny")}
    reference.setup(replace(cycles.context, model="reference", models=models))
    columns = {name: trajectories().columns[name] for name in reference.input_ports}
    before = reference.run(**columns).log_probs.values  # type: ignore[arg-type]
    cycles.train(1)
    cycles.read(1)
    assert np.array_equal(reference.run(**columns).log_probs.values, before)  # type: ignore[arg-type]
