"""Every library node keeps what nodes owe the engine, and a node that breaks one property is told so and no more."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import Field, PrivateAttr

from flowrl.batch import Json, Prompt, Sample, Step, Token
from flowrl.column import objects
from flowrl.metrics import failure, metric
from flowrl.node import Context, Node
from flowrl.registry import find, library_names
from flowrl.rows import Rows
from flowrl.testing import NodeTestError, check_node, verdicts_of

OTHER_SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("reward.exact_match", {"ignore_case": True, "strip": False}),
    ("reward.weighted_sum", {"coefficients": [1.0, 2.0, 3.0]}),
    ("advantage.grpo", {"normalize": "none"}),
    ("advantage.grpo", {"baseline": "leave_one_out"}),
    ("advantage.multi_reward", {"normalize": "none", "whiten": True}),
    ("advantage.reinforce_plus_plus", {"gamma": 0.5}),
    ("advantage.gae", {"gamma": 0.9, "lam": 0.5, "whiten": False}),
    ("advantage.reverse_kl", {"reward_coef": 1.0, "clip": 1.0}),
    ("reward.kl_penalty", {"target": 6.0, "horizon": 10}),
    ("rollout.generate", {"engine": "fake", "max_tokens": 3}),
    ("rollout.generate", {"max_tokens": 4, "temperature": 0.5}),
    ("filter.rollout_correction", {"weighting": "sequence", "masking": "geometric", "newest_only": True}),
    ("update.policy", {"kl_coef": 0.1, "entropy_coef": 0.1, "aggregation": "seq-mean-token-sum-norm"}),
    ("update.policy", {"minibatch": 2, "epochs": 2, "shuffle": True}),
    ("update.policy", {"minibatch": 3}),
    ("update.policy", {"minibatch": 2, "epochs": 2, "loss": "geo_mean", "kl_coef": 0.1, "kl": "k3+"}),
    ("update.policy", {"minibatch": 2, "epochs": 2, "loss": "gpg"}),
    ("update.value", {"minibatch": 2, "epochs": 2, "clip": 0.01, "aggregation": "seq-mean-token-mean"}),
]


@pytest.mark.parametrize(("name", "settings"), [*((name, {}) for name in library_names()), *OTHER_SETTINGS])
def test_a_library_node_keeps_its_contract(name: str, settings: dict[str, Any]) -> None:
    check_node(find(name, Path()).load(), **settings)


class Good(Node):
    """Keeps every property; the others below break one each."""

    scale: float = Field(1.0, ge=0)

    class Out(NamedTuple):
        shaped: Sample[float]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        return self.Out(reward - self.scale * response_mask.sum("sample"))


class Crashes(Good):
    """Never runs."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        raise RuntimeError("out of order")


class SetupCrashes(Good):
    """Cannot be set up."""

    def setup(self, context: Context) -> None:
        raise OSError("no such judge")


class ReportsFailures(Good):
    """Gives up on rows that are all right."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        failure([reward.rows.names()[1]], ValueError("not today"))
        return super().run(reward, response_mask)


_calls = itertools.count()


class Random(Good):
    """Another answer on every call."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        return self.Out(reward + next(_calls))


class Mutates(Good):
    """Works in place."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        reward.values *= 2
        return self.Out(reward)


class MutatesPrompts(Node):
    """Works in place on what siblings share."""

    class Out(NamedTuple):
        text: Prompt[str]

    def run(self, prompt: Prompt[str], info: Sample[Json]) -> Out:
        prompt.values[:] = [text.upper() + "!" for text in prompt]
        return self.Out(prompt)


class NeedsOptional(Node):
    """Says that it can do without, and cannot."""

    class Out(NamedTuple):
        total: Sample[float]

    def run(self, reward: Sample[float], extra: Sample[float] | None = None) -> Out:
        return self.Out(reward + extra.values)  # type: ignore[union-attr]


class Fraction(Node):
    """Half an integer."""

    class Out(NamedTuple):
        count: Sample[int]

    def run(self, reward: Sample[float]) -> Out:
        return self.Out(Sample(reward.rows, np.full(len(reward), 0.5)))


class OtherAxis(Good):
    """A token's value where a trajectory's is declared."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Any:
        return self.Out(response_mask * 1.0)  # type: ignore[arg-type]


class NoOut(Good):
    """Returns the column itself."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Any:
        return reward


class Nothing(Good):
    """Forgets to return."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Any:
        return None


class NotFinite(Node):
    """NaN where nothing may be missing."""

    class Out(NamedTuple):
        weight: Token[float]

    def run(self, response_mask: Token[bool]) -> Out:
        values = np.where(response_mask.values, 1.0, np.nan)
        return self.Out(Token(response_mask.rows, values, response_mask.offsets))


class OtherLengths(Node):
    """One token less for each response."""

    scope = "batch"

    class Out(NamedTuple):
        weight: Token[float]

    def run(self, response_mask: Token[bool]) -> Out:
        return self.Out(Token.of(response_mask.rows, [row[1:] * 1.0 for row in response_mask.jagged], "float"))


class Reorders(Good):
    """The best row first, with its identity."""

    scope = "group"

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        order = np.argsort(-reward.values, kind="stable")
        return self.Out(Sample(reward.rows.take(order), reward.values[order]))


class Loses(Good):
    """Keeps a row to itself."""

    scope = "batch"

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        return self.Out(Sample(reward.rows.take(np.arange(1, len(reward))), reward.values[1:]))


class ByPosition(Good):
    """Weights by the place in the batch, which means nothing."""

    scope = "batch"

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        return self.Out(reward * (Sample(reward.rows, np.arange(len(reward), dtype=float))))


class Filters(Good):
    """Only the rows with a reward above 0, in the order in which they came."""

    scope = "batch"
    cardinality = "filters"

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        kept = np.flatnonzero(reward.values > 0)
        return self.Out(Sample(reward.rows.take(kept), reward.values[kept]))


class Sorts(Filters):
    """The same, the best first."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        kept = np.argsort(-reward.values, kind="stable")[:3]
        return self.Out(Sample(reward.rows.take(kept), reward.values[kept]))


class Streams(Good):
    """Block by block."""

    scope = "group"

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Any:
        for group in range(reward.rows.num_groups):
            rows, index = reward.rows.take_groups(np.array([group]))
            yield self.Out(Sample(rows, reward.values[index]))


class Invents(Node):
    """A trajectory that nobody asked for."""

    scope = "group"
    cardinality = "expands"

    class Out(NamedTuple):
        rows: Rows
        text: Sample[str]

    def run(self, prompt: Prompt[str]) -> Iterator[Out]:
        for uid, size in zip(prompt.rows.uids, prompt.rows.planned.tolist(), strict=True):
            rows = Rows([uid], [0] * (size + 1), list(range(size + 1)))
            yield self.Out(rows, Sample(rows, ["x"] * len(rows)))


class Twice(Invents):
    """The first trajectory once more."""

    def run(self, prompt: Prompt[str]) -> Iterator[Invents.Out]:
        for uid in prompt.rows.uids:
            rows = Rows([uid], [0, 0], [0, 0])
            yield self.Out(rows, Sample(rows, ["x", "y"]))


class Neighbours(Good):
    """A mean over whatever comes along."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        return self.Out(reward - float(np.nanmean([*reward.values, 0.0])))


class OtherGroups(Neighbours):
    """The same, of whole groups."""

    scope = "group"


class NotEmpty(Good):
    """Divides by the number of tokens."""

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        return self.Out(
            Sample(reward.rows, [r / len(row) for r, row in zip(reward, response_mask.jagged, strict=True)])
        )


class NotMasked(Node):
    """A mean over the masked tokens, of which there may be none."""

    class Out(NamedTuple):
        weight: Token[float]

    def run(self, response_mask: Token[bool]) -> Out:
        share = response_mask.sum("sample").values.astype(float)
        with np.errstate(divide="ignore"):
            return self.Out(Sample(response_mask.rows, 1 / share).per_token(response_mask))


class NotNull(Node):
    """Spreads a reward that may be missing."""

    class Out(NamedTuple):
        weight: Token[float]

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Out:
        return self.Out(reward.per_token(response_mask))


class NotNone(Node):
    """Looks into what may be missing."""

    class Out(NamedTuple):
        size: Sample[int]

    def run(self, info: Sample[Json]) -> Out:
        return self.Out(Sample(info.rows, [len(str(value)) if value is not None else value[0] for value in info]))


class Value(Node):
    """The same value for every sample."""

    text: Any = "text"
    score: Any = None
    info: Any = (np.float32(1), {1}, float("nan"))

    class Out(NamedTuple):
        text: Sample[str]
        score: Sample[float]
        info: Sample[Json]

    def run(self, response: Sample[str]) -> Out:
        rows = response.rows
        columns = [Sample[Any](rows, objects([value] * len(rows))) for value in (self.text, self.score, self.info)]
        return self.Out(*columns)


RUNS, SEED = "runs on a plain batch", "is deterministic under a seed"
READS, WRITES, ROWS = "reads only what it declares", "writes what it declares", "keeps identities"
SCOPE, EDGES, NULLS = "needs no more than its scope", "survives empty and short rows", "survives nulls"
STATE = "goes on from its state"


@pytest.mark.parametrize(
    ("cls", "broken", "said"),
    [
        (Crashes, RUNS, "RuntimeError: out of order"),
        (SetupCrashes, RUNS, "setup: OSError: no such judge"),
        (ReportsFailures, RUNS, "ValueError: not today"),
        (Random, SEED, "'shaped' of u2_0_0 is"),
        (Mutates, READS, "it changes its input 'reward' of u2_0_0"),
        (MutatesPrompts, READS, "it changes its input 'prompt' of u2"),
        (NeedsOptional, READS, "without extra: AttributeError"),
        (Fraction, WRITES, "'count' is no Sample[int]: int cannot hold 0.5"),
        (OtherAxis, WRITES, "'shaped' is Token, not Sample[float]"),
        (NoOut, WRITES, "it returns Sample, not its Out"),
        (Nothing, WRITES, "it returns NoneType, not its Out"),
        (NotFinite, WRITES, "'weight' is not finite for u2_0_0, u2_1_0"),
        (OtherLengths, WRITES, "'weight' has other lengths than the tokens that it reads"),
        (Reorders, ROWS, "in another order than they came in"),
        (Loses, ROWS, "it is given 9 rows and writes 8"),
        (Sorts, ROWS, "in another order than they came in"),
        (ByPosition, ROWS, "with the groups in another order, 'shaped' of"),
        (Invents, ROWS, "it writes rows that it was not asked for: u2_3_0"),
        (Twice, ROWS, "it writes rows twice: u2_0_0"),
        (Neighbours, SCOPE, "in the batch, and with its row alone (its scope is 'sample')"),
        (OtherGroups, SCOPE, "in the batch, and with its group alone (its scope is 'group')"),
        (NotEmpty, EDGES, "with an empty response: ZeroDivisionError: float division by zero"),
        (NotMasked, EDGES, ": 'weight' is not finite for"),
        (NotNull, NULLS, "with a null: 'weight' is not finite for u8_1_0"),
        (NotNone, NULLS, "with a null: TypeError"),
    ],
)  # fmt: skip
def test_a_broken_node_breaks_exactly_one_property(cls: type[Node], broken: str, said: str) -> None:
    found = verdicts_of(cls)
    assert [(verdict.name, said in verdict.details) for verdict in found if verdict.holds is False] == [
        (broken, True)
    ], found
    with pytest.raises(NodeTestError, match=broken) as caught:
        check_node(cls)
    assert caught.value.failed == (broken,)


def test_a_node_that_keeps_all_of_them_is_told_so() -> None:
    assert check_node(Good) == [RUNS, SEED, READS, WRITES, ROWS, SCOPE, EDGES, NULLS]
    assert check_node(Good(scale=0.5), seed=3) == check_node(Good)


def test_a_filter_and_a_stream_keep_them_too() -> None:
    assert check_node(Filters) == [RUNS, SEED, READS, WRITES, ROWS, EDGES, NULLS]
    assert check_node(Streams) == check_node(Good)


class Remembers(Good):
    """Compares a reward with the mean of all batches so far, and keeps that in the checkpoint."""

    scope = "batch"
    pure = False

    _seen: dict[str, list[float]] = PrivateAttr(default_factory=dict)

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        seen = self._seen.setdefault("rewards", [])
        before = float(np.mean(seen)) if seen else 0.0
        seen.extend(sorted(reward.values[np.isfinite(reward.values)].tolist()))
        return self.Out(reward - before)

    def state(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def load_state(self, state: dict[str, Any]) -> None:
        self._seen = state["seen"]


class Forgets(Remembers):
    """Its state lacks what it remembers."""

    def state(self) -> dict[str, Any]:
        return {}


class Misreads(Remembers):
    """It saves under another name than it loads."""

    def state(self) -> dict[str, Any]:
        return {"sean": self._seen}


class Unwritable(Remembers):
    """It saves what no file can hold."""

    def state(self) -> dict[str, Any]:
        return {"seen": self._seen, "clock": lambda: 0}


class OtherMetric(Remembers):
    """Only what it reports shows that it has forgotten."""

    _num_runs: int = PrivateAttr(0)

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        self._num_runs += 1
        metric("mine/runs", self._num_runs, reduce="last")
        return super().run(reward, response_mask)


def test_a_node_that_remembers_is_tried_once_more() -> None:
    """What it remembers is no fault of the order of groups, nor of a group alone."""
    assert check_node(Remembers) == [RUNS, SEED, READS, WRITES, ROWS, EDGES, NULLS, STATE]

    class OfGroups(Remembers):
        scope = "group"

        def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
            return super().run(reward, response_mask)

    assert check_node(OfGroups) == [RUNS, SEED, READS, WRITES, ROWS, SCOPE, EDGES, NULLS, STATE]


def test_a_node_that_remembers_and_does_not_say_so_is_told_how() -> None:
    class Secretly(Remembers):
        pure = True

    (verdict,) = (one for one in verdicts_of(Secretly) if one.holds is False)
    assert verdict.name == ROWS
    assert verdict.details.endswith("\nso it does with the same batch again: a node that remembers says `pure = False`")
    for cls in (ByPosition, Neighbours, OtherGroups):
        assert not any("remembers" in one.details for one in verdicts_of(cls))


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (Forgets, "itself and another that loaded its state differ in their next: 'shaped' of u2_0_0 is"),
        (Misreads, "state: KeyError: 'seen'\ntest_every_node.py:"),
        (Unwritable, "state: "),
        (OtherMetric, "loaded its state differ in their next: 'metric' of mine/runs is 2"),
    ],
)
def test_what_a_checkpoint_would_lose_is_told(cls: type[Node], said: str) -> None:
    assert [(one.name, said in one.details) for one in verdicts_of(cls) if one.holds is False] == [(STATE, True)]


def test_what_failed_is_said_with_its_rows_and_its_line() -> None:
    (verdict,) = (verdict for verdict in verdicts_of(NotEmpty) if verdict.name == EDGES)
    error, line, rows = verdict.details.split("\n")
    assert error == "with an empty response: ZeroDivisionError: float division by zero"
    assert line.startswith("test_every_node.py:")
    assert "r / len(row)" in line
    assert rows == "rows u2_1_0, u5e1_1_0, u8_0_0"


class Settings(Node):
    """Reads what its settings ask for, and refuses some fields before launch."""

    eager: bool = False
    both: int = Field(ge=2, le=9)

    class Out(NamedTuple):
        y: Sample[float]

    def needs(self) -> dict[str, bool]:
        return {"extra": self.eager, "budget": False}

    def refuses(self, reads: Any, num_prompts: int, max_staleness: int = 0) -> str:
        return "one reward only" if len(reads["rewards"]) != 1 else ""

    def run(
        self, rewards: list[Sample[float]], extra: Sample[float] | None = None, budget: Step[int] | None = None
    ) -> Out:
        assert len(rewards) == 1
        assert budget is None
        assert (extra is not None) == self.eager
        return self.Out(rewards[0])


@pytest.mark.parametrize("eager", [False, True])
def test_settings_decide_which_inputs_are_there(eager: bool) -> None:
    assert READS in check_node(Settings, eager=eager)


def test_settings_that_refuse_every_batch_are_a_fault() -> None:
    class Refuses(Settings):
        def refuses(self, reads: Any, num_prompts: int, max_staleness: int = 0) -> str:
            return "never"

    with pytest.raises(NodeTestError, match="its settings refuse the batch: never"):
        check_node(Refuses)


class Drawn(Good):
    """Noise that follows from the seed of the run and from the row."""

    _seed: int = PrivateAttr(0)

    def setup(self, context: Context) -> None:
        self._seed = context.seed

    def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
        noise = [np.random.default_rng([self._seed, sum(map(ord, name))]).normal() for name in reward.rows.names()]
        return self.Out(reward + Sample(reward.rows, noise))


def test_chance_by_seed_and_row_is_deterministic_and_by_a_counter_is_not_of_the_row() -> None:
    assert SEED in check_node(Drawn)

    class Sequence(Good):
        _draw: Any = PrivateAttr()

        def setup(self, context: Context) -> None:
            self._draw = np.random.default_rng(context.seed)

        def run(self, reward: Sample[float], response_mask: Token[bool]) -> Good.Out:
            return self.Out(reward + Sample(reward.rows, self._draw.normal(size=len(reward))))

    with pytest.raises(NodeTestError) as caught:
        check_node(Sequence)
    assert caught.value.failed == (SCOPE,)


def test_a_sync_has_no_properties_to_try() -> None:
    assert check_node(find("sync.weights", Path()).load()) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"score": float("nan")}, ""),
        ({"text": None}, "'text' is no Sample[str]: str cannot hold null, in u2_0_0, u2_1_0"),
        ({"text": 3}, "'text' is no Sample[str]: str cannot hold 3, in u2_0_0, u2_1_0"),
        ({"score": -math.inf}, "'score' is infinite for u2_0_0, u2_1_0"),
        ({"score": 1e300}, "'score' is infinite for u2_0_0, u2_1_0"),
        ({"info": int}, "'info' is no Sample[json]: json cannot hold <class 'int'>, in u2_0_0, u2_1_0"),
        ({"info": {"a": [object]}}, "'info' is no Sample[json]: json cannot hold <class 'object'>, in u2_0_0"),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_value_that_its_type_cannot_hold_is_told_with_its_rows(settings: dict[str, Any], said: str) -> None:
    found = {verdict.name: verdict for verdict in verdicts_of(Value, **settings)}
    assert [name for name, verdict in found.items() if verdict.holds is False] == [WRITES] * bool(said)
    assert said in found[WRITES].details
