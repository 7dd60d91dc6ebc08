"""FR055: models that cannot fit are refused with the arithmetic and with what would make them fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrl.errors import Problem
from flowrl.nodes.rollout.generate import Generate
from flowrl.pipeline import load

BIG = Path(__file__).parents[1] / "seven_billion.yaml"
GIB = 2**30
LLAMA = "params.base=meta-llama/Llama-3.1-70B-Instruct"
APART = "pools.generate={shares: null, workers: 8}"


def problems(*sets: str) -> list[Problem]:
    return [problem for problem in load(BIG, sets).check() if problem.severity == "error"]


def only(*sets: str) -> Problem:
    (problem,) = problems(*sets)
    assert problem.code == "FR055"
    return problem


@pytest.mark.parametrize("workers", [8, 64])
def test_what_fits_is_not_refused(workers: int) -> None:
    assert problems(f"pools.train.workers={workers}") == []


def test_a_whole_7b_on_each_worker_is_refused_with_the_arithmetic() -> None:
    """7,615,616,512 parameters: 28.4 GiB weights + 28.4 gradients + 56.7 AdamW + 28.4 engine + 1.8 reference."""
    problem = only("models.policy.parallel=ddp")
    assert problem.place.path == "pools.train.memory_per_worker"
    assert problem.place.text.strip().startswith("train: {workers: 8, memory_per_worker: 80}")
    assert problem.fact == "the models of pools.train need at least 143.8 GiB on each worker, which has 80 GiB"
    whole = "whole on each worker (ddp)"
    assert problem.notes == (
        f"policy weights 28.4 GiB: 7,615,616,512 x 4 B, {whole}",
        f"policy gradients 28.4 GiB: 7,615,616,512 x 4 B, {whole}",
        f"policy AdamW 56.7 GiB: 7,615,616,512 x 8 B, {whole}",
        "policy engine 28.4 GiB: 7,615,616,512 x 4 B, an engine owns a whole copy",
        "reference weights 1.8 GiB: 7,615,616,512 x 2 B / 8 workers (fsdp2)",
        "policy KV cache 0.1 GiB: 1 session x 1,280 tokens x 2 x 28 layers x 4 heads x 128 x 4 B",
        "28.4 + 28.4 + 56.7 + 28.4 + 1.8 + 0.1 = 143.8 GiB of 80 GiB",
        "a session of rollout has a prompt of 256 tokens (assumed) and a response of 1,024 (max_tokens of rollout)",
    )
    assert problem.fix == "models.policy.parallel: fsdp2 over 8 workers: 44.5 GiB"


def test_a_70b_does_not_fit_on_8_workers_whatever_is_done() -> None:
    """70,553,706,496 parameters: the engine's copy alone has 4 B x 70.6e9 = 262.8 GiB."""
    problem = only(LLAMA)
    assert "need at least 411.5 GiB" in problem.fact
    assert problem.fix == (
        "a smaller model, or workers with at least 412 GiB: the engine of policy alone needs 262.8 GiB on one worker"
    )


def test_a_pool_of_its_own_is_not_offered_where_the_engine_alone_is_too_large() -> None:
    assert only(LLAMA, "pools.train.workers=4").fix.startswith("a smaller model, or workers with at least 560 GiB: ")


def test_no_pool_of_its_own_is_offered_where_the_schedule_forbids_it() -> None:
    mode = "schedule={mode: colocate_async, warmup_batches: 1, max_staleness: 1}"
    assert only("pools.train.workers=2", mode).fix == "at least 3 workers"
    frozen = "nodes.draft={use: rollout.generate, model: reference, pool: train, max_tokens: 4, writes: {%s}}"
    writes = ", ".join(f"{name}: d_{name}" for name in Generate.output_ports)
    with_draft = only("pools.train={workers: 3, memory_per_worker: 76}", mode, frozen % writes)
    assert "a pool of its own for draft: " in with_draft.fix, "its model is not trained"


def test_the_training_of_a_70b_fits_on_more_workers() -> None:
    """Apart from its rollout: 18 B x 70,553,706,496 = 1182.8 GiB, over 80 GiB a worker at least 15 workers."""
    assert only(LLAMA, APART).fix == "at least 15 workers"
    assert problems(LLAMA, APART, "pools.train.workers=15") == []
    assert [p.code for p in problems(LLAMA, APART, "pools.train.workers=14")] == ["FR055"]


def test_a_pool_of_its_own_for_the_rollout_may_be_enough() -> None:
    problem = only("pools.train.workers=2")
    assert problem.fix == "a pool of its own for rollout: 63.8 GiB; or at least 3 workers"
    assert problems("pools.train.workers=2", APART) == []
    assert problems("pools.train.workers=3") == []


def test_a_frozen_model_may_be_narrower() -> None:
    sets = ("models.reference={parallel: ddp, dtype: float32}", "pools.train.memory_per_worker=60")
    assert "models.reference.dtype: bfloat16: 56.9 GiB" in only(*sets).fix
    assert problems(*sets, "models.reference.dtype=bfloat16") == []


def test_only_all_changes_together_may_be_enough() -> None:
    sets = ("models.policy.parallel=ddp", "models.reference.parallel=ddp", "pools.train.memory_per_worker=29")
    assert only(*sets).fix == (
        "models.policy.parallel: fsdp2, models.reference.parallel: fsdp2 over 8 workers and a pool of its own for "
        "rollout: 28.5 GiB; or models.policy.parallel: fsdp2, models.reference.parallel: fsdp2 over at least 260 "
        "workers"
    )


def settings_of(way: str, sets: dict[str, str]) -> Iterator[str]:
    """What a user who follows one way of the advice writes."""
    limit, workers = sets["pools.train.memory_per_worker"], sets["pools.train.workers"]
    for model, key, value in re.findall(r"models\.(\w+)\.(parallel|dtype): (\w+)", way):
        yield f"models.{model}.{key}={value}"
    if "at least" in way and "GiB" in way:
        limit = re.findall(r"at least ([\d,]+) GiB", way)[0].replace(",", "")
        yield f"pools.train.memory_per_worker={limit}"
    elif "at least" in way:
        workers = re.findall(r"at least ([\d,]+) workers", way)[0].replace(",", "")
        yield f"pools.train.workers={workers}"
    if "a pool of its own for rollout" in way:
        yield f"pools.generate={{shares: null, workers: {workers}, memory_per_worker: {limit}}}"


MODES = ["{mode: sync}", "{mode: colocate_async, warmup_batches: 1, max_staleness: 1}"]


@settings(max_examples=150, deadline=None)
@given(
    base=st.sampled_from(["Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-30B-A3B"]),
    workers=st.integers(1, 40),
    limit=st.integers(1, 400),
    parallel=st.tuples(*[st.sampled_from(["ddp", "fsdp2"])] * 2),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    mode=st.sampled_from(MODES),
)
def test_whoever_follows_the_advice_has_models_that_fit(
    base: str, workers: int, limit: int, parallel: tuple[str, str], dtype: str, mode: str
) -> None:
    sets = {
        "params.base": base, "pools.train.workers": f"{workers}", "pools.train.memory_per_worker": f"{limit}",
        "models.policy.parallel": parallel[0], "models.reference.parallel": parallel[1],
        "models.reference.dtype": dtype, "schedule": mode,
    }  # fmt: skip
    given_ = [f"{key}={value}" for key, value in sets.items()]
    for problem in (problem for problem in problems(*given_) if problem.code == "FR055"):
        for way in problem.fix.split("; or "):
            codes = {found.code for found in problems(*given_, *settings_of(way, sets))}
            assert not codes & {"FR055", "FR071"}, way


@pytest.mark.parametrize("limit", ["1.0e-300", "1", "43", "44.4"])
def test_any_limit_that_is_too_small_is_refused(limit: str) -> None:
    assert only(f"pools.train.memory_per_worker={limit}").fix


@pytest.mark.parametrize("limit", ["45", "1.0e+308", "null"])
def test_no_limit_that_is_enough_is_refused(limit: str) -> None:
    assert problems(f"pools.train.memory_per_worker={limit}") == []


@pytest.mark.parametrize(
    ("sets", "codes"),
    [
        (["params.base=nobody/nothing"], []),
        (["models.policy.parallel=fsdp"], ["FR007"]),
        (["models.policy.dtype=float8"], ["FR007"]),
        (["models.policy.parallel=ddp", "pools.train.workers=0"], ["FR007"]),
        (["models.policy.parallel=ddp", "nodes.rollout.pool=nowhere"], ["FR012", "FR055"]),
        (["models.policy.parallel=ddp", "pools.train.shares=generate"], None),
        (["models.policy.parallel=ddp", "nodes.rollout.engine=fake", "models.reference=null",
          "nodes.ref_logprob=null", "nodes.actor_update.kl_coef=0"], ["FR055"]),
    ],
)  # fmt: skip
def test_what_follows_from_another_mistake_is_withheld(sets: list[str], codes: list[str] | None) -> None:
    found = [problem.code for problem in problems(*sets)]
    assert "FR055" not in found if codes is None else found == codes
