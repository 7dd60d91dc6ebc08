"""The engine of a simulated worker: when groups end that are decoded together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from flowrl.simulate.clock import simulated
from flowrl.simulate.costs import Decoding, Observed, Response
from flowrl.simulate.serving import Serving

Work = Callable[[Serving], Awaitable[None]]
LENGTHS = Observed((Response(1.0, 1.0),))


@dataclass
class Seen:
    """When groups ended, the version of each, and the spans in which the engine was busy."""

    times: dict[str, float] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    spans: list[tuple[float, float]] = field(default_factory=list)


def served(cost: Decoding, groups: dict[str, tuple[float, Response]], work: Work | None = None) -> Seen:
    """What becomes of groups that are asked for at a time, each by a call of its own, while something else happens."""
    seen = Seen()

    async def ask(serving: Serving, call: int, uid: str, at: float, response: Response) -> None:
        await asyncio.sleep(at)
        seen.versions[uid] = (await serving.add(uid, call, response)).version
        seen.times[uid] = asyncio.get_running_loop().time()

    async def everything() -> None:
        serving = Serving(cost, lambda start, end: seen.spans.append((start, end)))
        asked = [ask(serving, call, uid, at, response) for call, (uid, (at, response)) in enumerate(groups.items())]
        await asyncio.gather(*asked, *([work(serving)] if work else []))

    simulated(everything())
    return seen


def test_without_a_cost_for_each_sequence_groups_do_not_hinder_each_other() -> None:
    seen = served(Decoding(LENGTHS, 0.1), {"a": (0.0, Response(10, 4)), "b": (0.5, Response(10, 4))})
    assert seen.times == pytest.approx({"a": 1.0, "b": 1.5})
    assert seen.spans == [(0.0, pytest.approx(1.5))]


def test_with_one_they_slow_each_other_down_and_make_up_for_it_later() -> None:
    cost = Decoding(LENGTHS, 0.0, 0.1)
    seen = served(cost, {"long": (0.0, Response(20, 1)), "short": (0.0, Response(10, 1))})
    assert seen.times == pytest.approx({"short": 2.0, "long": 3.0})


def test_seconds_of_a_step_are_those_of_its_sequences() -> None:
    cost = Decoding(LENGTHS, 0.5, 0.25)
    seen = served(cost, {"a": (0.0, Response(8, 2.0))})
    assert seen.times == pytest.approx({"a": 8 * (0.5 + 2 * 0.25)})
    assert cost.tokens_per_second(2) == pytest.approx(2.0)


def test_calls_that_take_turns_take_as_long_as_they_would_one_after_the_other() -> None:
    cost = Decoding(LENGTHS, 0.1, one_call_a_step=True)
    seen = served(cost, {"a": (0.0, Response(10, 1)), "b": (0.0, Response(10, 1))})
    assert seen.times == pytest.approx({"a": 2.0, "b": 2.0})


def test_a_group_waits_until_there_is_room() -> None:
    cost = Decoding(LENGTHS, 0.1, max_groups=1)
    seen = served(cost, {"a": (0.0, Response(10, 1)), "b": (0.0, Response(10, 1))})
    assert seen.times == pytest.approx({"a": 1.0, "b": 2.0})


def test_while_it_is_stopped_nothing_goes_on_and_nothing_is_lost() -> None:
    async def pause(serving: Serving) -> None:
        await asyncio.sleep(0.4)
        serving.stop("asleep")
        serving.stop("updating")
        await asyncio.sleep(5.0)
        serving.go("updating")
        await asyncio.sleep(5.0)
        serving.go("asleep")

    seen = served(Decoding(LENGTHS, 0.1), {"a": (0.0, Response(10, 1)), "b": (1.0, Response(1, 1))}, pause)
    assert seen.times == pytest.approx({"a": 11.0, "b": 10.5})
    assert seen.spans == [(0.0, pytest.approx(0.4)), (pytest.approx(10.4), pytest.approx(11.0))]


def test_after_a_pause_what_each_sequence_has_is_read_again() -> None:
    async def pause(serving: Serving) -> None:
        await asyncio.sleep(1.5)
        serving.stop("asleep")
        serving.go("asleep")

    cost = Decoding(LENGTHS, 0.1, prefix_seconds=0.01, prompt_tokens=50)
    seen = served(cost, {"a": (0.0, Response(20, 2))}, pause)
    assert seen.times == pytest.approx({"a": 0.5 + 2.0 + 0.01 * (50 + 2 * 10)})


def test_the_version_is_that_of_the_first_tokens() -> None:
    async def update(serving: Serving) -> None:
        await asyncio.sleep(0.5)
        serving.version = 7

    groups = {"old": (0.0, Response(10, 1)), "new": (0.6, Response(1, 1))}
    seen = served(Decoding(LENGTHS, 0.1), groups, update)
    assert seen.versions == {"old": 0, "new": 7}


def test_what_is_aborted_ends_at_once_and_the_others_go_on() -> None:
    async def abort(serving: Serving) -> None:
        await asyncio.sleep(0.5)
        serving.abort(["a", "waiting", "unknown"])

    cost = Decoding(LENGTHS, 0.1, max_groups=2)
    groups = {"a": (0.0, Response(math.inf, 1)), "b": (0.0, Response(10, 1)), "waiting": (0.0, Response(10, 1))}
    seen = served(cost, groups, abort)
    assert seen.times == pytest.approx({"a": 0.5, "waiting": 0.5, "b": 1.0})
