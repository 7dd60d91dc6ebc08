"""Engines that serve: several calls at once, and requests that outlive sleep, updates and the end of others."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.batch import Json, Prompt
from flowrl.metrics import collect
from flowrl.model import ModelSpec
from flowrl.node import Context
from flowrl.nodes._backend.chat import ChatFormat
from flowrl.nodes._backend.engine import Aborted, Completion, Engine, Finished, Request, Sampling, engines_of, seed_of
from flowrl.nodes._backend.fake import FakeEngine
from flowrl.nodes._backend.generation import TransformersEngine
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.models import load_model
from flowrl.nodes._backend.script import Script
from flowrl.nodes._backend.weights import Bucket, Update, WeightsError, buckets
from flowrl.nodes.rollout.generate import Generate
from flowrl.rows import Jagged, Rows

SPEC = ModelSpec(path="arith-tiny")
LONG = Sampling(32, 2.0)
"""Hot enough for long responses."""
SOON = 20.0
"""Seconds that nothing here takes."""
Made = Callable[[], Engine]


def transformers() -> Engine:
    return TransformersEngine(SPEC, "cpu", ChatFormat(), 512)


def scripted(**script: Any) -> FakeEngine:
    return FakeEngine(Script(**{"texts": ["12345"], "tokens_per_second": 20.0, **script}))


BOTH = pytest.mark.parametrize("made", [transformers, scripted])


def requests_of(num: int = 6, group: int = 4, first: int = 0) -> list[Request]:
    """Prompts such as `12+3=`."""
    names = [f"u{first + index}" for index in range(num)]
    return [Request([11, 3, 4 + index % 6, 7][: 3 + index % 2], [seed_of(0, name, s) for s in range(group)], name)
            for index, name in enumerate(names)]  # fmt: skip


def gathered(engine: Engine, requests: Sequence[Request], sampling: Sampling = LONG) -> list[Any]:
    """All sessions in the order of their requests."""
    return in_order(each for block in engine.generate(requests, sampling) for each in block)


def in_order(blocks: Iterator[Finished]) -> list[Any]:
    found = {each.request: each.sessions for each in blocks}
    return [session for position in sorted(found) for session in found[position]]


def same(some: Sequence[Completion], others: Sequence[Completion]) -> bool:
    return len(some) == len(others) and all(
        np.array_equal(a.ids, b.ids) and np.allclose(a.log_probs, b.log_probs, atol=1e-5) and a.text == b.text
        for a, b in zip(some, others, strict=True)
    )


def changed(seed: int = 0, scale: float = 0.1) -> Any:
    """A model with other weights than the engine."""
    model, generator = load_model(SPEC), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    return model


def parts_of(model: Any) -> list[Bucket]:
    return list(buckets(model, "", 300_000))


def sync(engine: Engine, parts: Sequence[Bucket], version: int) -> None:
    for part in parts:
        if part.begins is not None:
            engine.begin_update(part.begins)
        engine.load_bucket(part)
        if part.ends:
            engine.finish_update(version)


def update(engine: Engine, version: int) -> None:
    """New weights for an engine of either kind."""
    if isinstance(engine, FakeEngine):
        sync(engine, [Bucket({}, {}, begins=Update({}), ends=True)], version)
    else:
        sync(engine, parts_of(changed(version)), version)


def beside(function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Run it in a thread, which nobody waits for where a test fails."""
    result = Future[Any]()

    def run() -> None:
        try:
            result.set_result(function(*arguments))
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def started(engine: Engine, requests: Sequence[Request]) -> Future[Any]:
    """A call that goes on in a thread, on an engine that was put to sleep after its first token."""
    blocks, first = engine.generate(requests, LONG), list[Finished]()
    if isinstance(engine, TransformersEngine):
        first = list(next(blocks))
        engine.sleep()
    work = beside(lambda: in_order(each for block in [first, *blocks] for each in block))
    if isinstance(engine, FakeEngine):
        wait_until(lambda: engine._turns._running)
        time.sleep(0.06)
        engine.sleep()
    return work


def wait_until(condition: Callable[[], Any]) -> None:
    until = time.monotonic() + SOON
    while not condition() and time.monotonic() < until:
        time.sleep(0.002)


def is_waiting(work: Future[Any], seconds: float = 0.2) -> bool:
    time.sleep(seconds)
    return not work.done()


@BOTH
def test_calls_of_several_threads_get_what_each_would_alone(made: Made) -> None:
    calls = [requests_of(3, first=3 * number) for number in range(6)]
    alone = [gathered(made(), call) for call in calls]
    engine = made()
    together = [beside(gathered, engine, call) for call in calls]
    assert all(same(one.result(SOON), other) for one, other in zip(together, alone, strict=True))


def test_calls_take_turns_token_by_token() -> None:
    engine = transformers()
    long = engine.generate(requests_of(8), LONG)
    assert next(long) == [] or True
    (short,) = engine.generate([requests_of(1)[0]], Sampling(1, 1.0))
    assert short[0].request == 0, "it did not wait for the end of the other"
    assert in_order(each for block in long for each in block)


def test_each_span_of_a_response_has_the_log_probabilities_of_its_weights() -> None:
    """Two updates while it runs: tokens so far stay, the next ones are computed from the new weights alone."""
    engine, requests = transformers(), requests_of()
    models = [load_model(SPEC), changed(1), changed(2)]
    untouched = gathered(transformers(), requests)
    blocks, found = engine.generate(requests, LONG), list[Finished]()
    for token, block in enumerate(blocks):
        found += block
        if token in (4, 11):
            version = 1 + (token > 4)
            sync(engine, parts_of(models[version]), version)
    done: list[Completion] = in_order(iter(found))
    spans = [np.unique(each.versions).tolist() for each in done]
    assert [0, 1, 2] in spans and [0, 1] in spans and engine.version() == 2
    assert all((each.versions[:5] == 0).all() and (each.versions[5:12] == 1).all() for each in done)
    assert all((each.versions[12:] == 2).all() and len(each.ids) <= LONG.max_tokens for each in done)
    assert any(len(each.ids) == LONG.max_tokens for each in done), "the budget counts the tokens of all spans"
    assert all(np.array_equal(a.ids[:5], b.ids[:5]) for a, b in zip(done, untouched, strict=True))
    check_spans(done, requests, models, 1e-5)


def check_spans(done: Sequence[Completion], requests: Sequence[Request], models: Sequence[Any], within: float) -> None:
    """Log-probabilities of each span against those of its weights, from the whole response at once."""
    prompts = Jagged.of([request.prompt for request in requests for _ in request.seeds], np.int64)
    responses = Jagged.of([each.ids for each in done], np.int64)
    versions = np.concatenate([each.versions for each in done])
    got = np.concatenate([each.log_probs for each in done])
    for version, model in enumerate(models):
        expected, _ = token_log_probs(model, prompts, responses, LONG.temperature)
        here = versions == version
        assert here.any() and np.abs(expected.detach().numpy() - got)[here].max() < within
        assert np.abs(expected.detach().numpy() - got)[~here].max() > 0.01, "other weights would have others"


@BOTH
def test_an_update_while_calls_are_served_loses_no_request(made: Made) -> None:
    engine = made()
    calls = [beside(gathered, engine, requests_of(4, first=4 * number)) for number in range(4)]
    for version in range(1, 4):
        time.sleep(0.02)
        update(engine, version)
    calls += [beside(gathered, engine, requests_of(2, first=90))]
    found = [call.result(SOON) for call in calls]
    assert [len(each) for each in found] == [16, 16, 16, 16, 8]
    assert all(isinstance(session, Completion) for each in found for session in each)
    assert all((np.diff(session.versions) >= 0).all() for each in found for session in each)
    assert all((session.versions == 3).all() for session in found[-1])


@BOTH
def test_sleep_keeps_requests_and_wake_lets_them_go_on(made: Made) -> None:
    engine, requests = made(), requests_of()
    alone = gathered(made(), requests)
    work = started(engine, requests)
    later = beside(gathered, engine, requests)
    assert is_waiting(work, 0.5) and is_waiting(later)
    engine.wake()
    assert same(work.result(SOON), alone) and same(later.result(SOON), alone)


@BOTH
def test_a_sleeping_engine_takes_weights_and_goes_on_with_them(made: Made) -> None:
    engine = made()
    engine.sleep()
    work = beside(gathered, engine, requests_of())
    update(engine, 5)
    assert is_waiting(work), "the update has ended, its sleep has not"
    engine.wake()
    assert all((session.versions == 5).all() for session in work.result(SOON))


@BOTH
def test_an_aborted_request_ends_at_once_and_the_others_go_on(made: Made) -> None:
    engine, requests = made(), requests_of()
    alone = gathered(made(), requests)
    work = started(engine, requests)
    engine.abort(["u0", "u3", "unknown"])
    engine.wake()
    found = work.result(SOON)
    ended = [position for position, each in enumerate(found) if isinstance(each, Aborted)]
    assert ended and set(ended) <= {0, 1, 2, 3, 12, 13, 14, 15}
    rest = [position for position in range(24) if position not in (0, 1, 2, 3, 12, 13, 14, 15)]
    assert same([found[position] for position in rest], [alone[position] for position in rest])
    assert same(gathered(engine, requests), alone), "a request of that name that comes later is another"


@BOTH
def test_what_is_aborted_while_the_engine_sleeps_ends_before_it_wakes(made: Made) -> None:
    engine, requests = made(), requests_of(2)
    engine.sleep()
    work = beside(gathered, engine, requests)
    wait_until(lambda: engine._turns._running)  # type: ignore[attr-defined]
    engine.abort([request.name for request in requests])
    assert all(isinstance(session, Aborted) for session in work.result(SOON))
    engine.wake()


def test_an_update_that_breaks_off_ends_the_calls_that_wait_for_it() -> None:
    engine, model = transformers(), changed()
    first, *others = parts_of(model)
    blocks = engine.generate(requests_of(), LONG)
    next(blocks)
    assert first.begins is not None
    engine.begin_update(first.begins)
    engine.load_bucket(first)
    work = beside(gathered, engine, requests_of())
    assert is_waiting(work)
    with pytest.raises(WeightsError, match="has not come"):
        engine.finish_update(1)
    for waiting in (lambda: work.result(SOON), lambda: next(blocks), lambda: gathered(engine, requests_of())):
        with pytest.raises(RuntimeError, match="only a part of its new weights"):
            waiting()
    sync(engine, [first, *others], 2)
    assert all((each.versions == 2).all() for each in gathered(engine, requests_of()))


def test_an_update_that_does_not_fit_leaves_the_old_weights_and_what_runs() -> None:
    engine = transformers()
    blocks = engine.generate(requests_of(), LONG)
    next(blocks)
    with pytest.raises(WeightsError):
        engine.begin_update(Update({}))
    assert all(isinstance(each, Completion) for each in in_order(each for block in blocks for each in block))


@pytest.mark.parametrize("seed", range(2))
@BOTH
def test_in_any_order_of_calls_sleep_updates_and_aborts_every_session_ends_once(made: Made, seed: int) -> None:
    engine, chance, calls = made(), random.Random(seed), list[tuple[list[Request], Future[Any]]]()
    for moment in range(60):
        deed = chance.choice(["call", "call", "sleep", "wake", "update", "abort"])
        if deed == "call":
            requests = requests_of(chance.randint(1, 3), chance.randint(1, 4), first=4 * moment)
            calls.append((requests, beside(gathered, engine, requests)))
        elif deed == "abort" and calls:
            engine.abort([chance.choice(calls)[0][0].name])
        elif deed == "update":
            update(engine, moment + 1)
        elif deed in ("sleep", "wake"):
            getattr(engine, deed)()
        time.sleep(0.02 * chance.random())
    engine.wake()
    for requests, call in calls:
        found = call.result(SOON)
        assert len(found) == sum(len(request.seeds) for request in requests)
        for session in found:
            assert isinstance(session, Aborted) or (
                len(session.ids) == len(session.log_probs) == len(session.versions) <= LONG.max_tokens
                and (np.diff(session.versions) >= 0).all()
            )


def test_a_call_that_is_left_does_not_hold_up_others() -> None:
    engine = transformers()
    blocks = engine.generate(requests_of(), LONG)
    next(blocks)
    blocks.close()
    engine.sleep()
    engine.wake()
    assert len(gathered(engine, requests_of())) == 24


def test_tokens_of_a_script_have_the_version_of_their_moment() -> None:
    engine = scripted(texts=["1234567"])
    start = time.monotonic()
    work = beside(gathered, engine, requests_of(1))
    time.sleep(0.17)
    engine.begin_update(Update({}))
    time.sleep(0.3)
    engine.load_bucket(Bucket({}, {}, ends=True))
    engine.finish_update(1)
    (first, *_) = work.result(SOON)
    assert first.versions.tolist() in [[0] * old + [1] * (8 - old) for old in (2, 3, 4, 5)]
    assert time.monotonic() - start >= 0.7, "its time stood still during the update"


def test_what_a_script_draws_follows_from_seeds_alone() -> None:
    script = Script(texts=["1", "22", "333"], shuffle=True, slow=0.125, tokens_per_second=1000.0, spread=0.1)
    seeds = list(range(800))
    drawn = script.sessions(0, seeds, 9, is_first=True)
    assert drawn == script.sessions(3, seeds, 9, is_first=False)
    assert [script.sessions(0, [seed], 9, is_first=True)[0] for seed in seeds[:5]] == drawn[:5]
    assert {text: 200 < sum(each.text == text for each in drawn) < 330 for text in script.texts} == dict.fromkeys(
        script.texts, True
    )
    assert 60 < sum(each.seconds > 0.01 for each in drawn) < 140
    assert script.sessions(0, [7], 2, is_first=True)[0].seconds <= drawn[7].seconds


def test_a_script_stalls_and_fails_only_the_first_time() -> None:
    engine, requests = scripted(stall=0.5, fail=0.5), requests_of(12)
    blocks = engine.generate(requests, LONG)
    ended = set[int]()
    work = beside(lambda: [ended.update(each.request for each in block) for block in blocks])
    wait_until(lambda: ended)
    assert is_waiting(work) and 0 < len(ended) < 12
    engine.abort({requests[position].name for position in range(12) if position not in ended})
    work.result(SOON)
    assert len(ended) == 12
    assert all(isinstance(session, Completion) for session in gathered(engine, requests))


@pytest.mark.parametrize("kind", ["transformers", "fake"])
def test_a_rollout_leaves_out_what_was_aborted_and_calls_it_no_failure(kind: Any) -> None:
    script = {"script": Script(seconds=[1.0, 0.3])} if kind == "fake" else {}
    node = Generate(engine=kind, max_tokens=32, temperature=2.0, **script)
    node.setup(Context(model="policy", models={"policy": SPEC}))
    rows = Rows(["a", "b"], planned=[4, 4], settled=[0, 0])
    abort = threading.Timer(0.1, node.abort, [["a"]])
    with collect() as report:
        if kind == "transformers":
            (engine,) = engines_of(node._context).values()
            engine.sleep()
            threading.Timer(0.4, engine.wake).start()
        abort.start()
        outs = list(node.run(Prompt[Json](rows, ["1+1=", "2+2="])))
    assert not report.failures
    assert [name for out in outs for name in out.rows.names()] == [f"b_{session}_0" for session in range(4)]
    assert {uid: settled for out in outs for uid, settled in zip(out.rows.uids, out.rows.settled, strict=True)} == {
        "a": 4, "b": 4,
    }  # fmt: skip
