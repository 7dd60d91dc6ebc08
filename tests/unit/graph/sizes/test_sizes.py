"""Bytes of fields, batch arithmetic, memory and FLOPs of a plan, against what really happens."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from flowrl.batch import COLUMN_CLASSES, Batch, PromptToken, Step, Token
from flowrl.fields import DTYPES, Axis, FieldType
from flowrl.graph.sizes.architecture import Architecture, Unknown, from_config
from flowrl.graph.sizes.batches import Generation, Passes
from flowrl.graph.sizes.flops import work_of_passes, work_of_rollout
from flowrl.graph.sizes.lengths import BYTES_PER_TOKEN, Lengths
from flowrl.graph.sizes.measure import field_bytes, field_sizes, lengths_of, measure
from flowrl.graph.sizes.memory import (
    GIB,
    LOGIT_BYTES,
    LOGIT_BYTES_OF_SAMPLING,
    LOGITS_COMPARED_AT_A_TIME,
    SCORES_AT_A_TIME,
    logits,
)
from flowrl.model import ModelSpec
from flowrl.model_files import ASSETS
from flowrl.node import Context
from flowrl.nodes._backend import distilling
from flowrl.nodes._backend.chunked import Scoring, head_log_probs
from flowrl.nodes._backend.logprob import token_log_probs
from flowrl.nodes._backend.prefix import sample
from flowrl.partition import Prompts, plan_micro_batches
from flowrl.pipeline import load
from flowrl.rows import Jagged, Rows
from flowrl.wire import to_arrow

PIPELINES = Path(__file__).parents[4] / "pipelines"
DEFAULT = PIPELINES / "grpo_sync.yaml"
BIG = Path(__file__).parents[1] / "seven_billion.yaml"


def passes(**changes: Any) -> Passes:
    settings = {
        "node": "update", "updates": True, "num_parts": 1, "prompts": 4, "last_prompts": 4, "group": 4, "epochs": 1,
        "ranks": 1, "max_tokens": 8192, "lengths": Lengths(4, 6),
    }  # fmt: skip
    return Passes(**{**settings, **changes})


# Fields


def column(type_: FieldType, rows: Rows, lengths: Lengths) -> Any:
    """A column in which every row is as long as assumed."""
    value = {"int": 1, "float": 1.0, "bool": True, "json": None, "str": "x"}[type_.dtype]
    tokens = {"Prompt": lengths.prompt_tokens, "Sample": lengths.response_tokens}.get(type_.axis, 1)
    if type_.dtype in ("str", "json"):
        text = "x" * (BYTES_PER_TOKEN * tokens - 2 * (type_.dtype == "json"))  # JSON adds two quotes
        value = text
    if type_.axis == "Step":
        return Step(rows, value)
    if type_.axis == "Token":
        return Token.of(rows, [[value] * lengths.response_tokens] * len(rows), type_.dtype)
    if type_.axis == "PromptToken":
        return PromptToken.of(rows, [[1] * lengths.prompt_tokens] * rows.num_groups)
    num = rows.num_groups if type_.axis == "Prompt" else len(rows)
    return COLUMN_CLASSES[type_.axis](rows, [value] * num).cast(type_.dtype)


STORED = [
    FieldType(axis, dtype)
    for axis in get_args(Axis)
    for dtype in DTYPES
    if axis != "Step" and (axis, dtype == "int") != ("PromptToken", False)
]


@pytest.mark.parametrize("type_", STORED, ids=str)
def test_the_bytes_of_a_field_are_those_of_its_arrow_columns(type_: FieldType) -> None:
    num_prompts, group, lengths = 12, 8, Lengths(70, 50)
    rows = Rows.of([f"u{number // group}" for number in range(num_prompts * group)])
    tables = to_arrow(Batch(rows, {"f": column(type_, rows, lengths)}, {"f": type_}))
    real = sum(table.column("f").nbytes for table in tables.values() if "f" in table.schema.names)
    assert field_bytes(type_, num_prompts, group, lengths) == pytest.approx(real, rel=0.1)


def test_a_field_is_released_after_its_last_reader() -> None:
    plan = load(DEFAULT).plan()
    sizes = field_sizes(plan, lengths_of(plan))
    assert sizes["prompt_ids"].released_after == ("actor_update",)
    assert sizes["response"].released_after == ("reward",)
    assert sizes["finish_reason"].released_after == ()
    assert all(set(size.released_after) <= set(plan.graph.fields[name].readers) for name, size in sizes.items())


# Lengths


@pytest.mark.parametrize(
    ("sets", "given_", "expected"),
    [
        ([], (None, None), (56, 8)),  # 64 positions hold both
        (["nodes.rollout.max_tokens=64"], (None, None), (16, 48)),
        (["params.base=nobody/nothing"], (None, None), (256, 8)),
        (["params.base=Qwen/Qwen3-8B", "nodes.rollout.max_tokens=2048"], (None, None), (256, 2048)),
        ([], (100, None), (100, 1)),
        ([], (None, 20), (44, 20)),
        ([], (7, 9), (7, 9)),
    ],
)
def test_lengths_are_assumed_where_they_are_not_given(
    sets: list[str], given_: tuple[int | None, int | None], expected: tuple[int, int]
) -> None:
    lengths = lengths_of(load(DEFAULT, sets).plan(), *given_).longest
    assert (lengths.prompt_tokens, lengths.response_tokens) == expected


SECOND = (
    "nodes.second={use: rollout.generate, model: policy, pool: generate, max_tokens: 300, writes: {prompt_ids: p2, "
    "response_ids: r2, response_mask: m2, rollout_log_probs: l2, policy_version: v2, response: t2, finish_reason: f2, "
    "num_turns: n2, temperature: tt2, max_tokens: mt2}}"
)
TWO = (
    "params.base=Qwen/Qwen2.5-0.5B", "nodes.rollout.max_tokens=100", SECOND,
    "nodes.score={use: reward.exact_match, reads: {response: t2}, writes: {reward: s2}}",
    "nodes.total={use: reward.weighted_sum, reads: {rewards: [reward, s2]}, writes: {reward: both}}",
    "nodes.advantage.reads={reward: both}",
)  # fmt: skip


def test_every_node_has_the_lengths_of_the_rollout_whose_rows_it_takes() -> None:
    plan = load(DEFAULT, TWO).plan()
    sizes = measure(plan)
    tokens = {name: sizes.lengths.of(name).response_tokens for name in plan.graph.order}
    assert tokens == {
        "rollout": 100, "second": 300, "old_logprob": 100, "ref_logprob": 100, "reward": 100, "score": 300,
        "total": 300, "advantage": 100, "actor_update": 100, "weight_sync": 300,
    }  # fmt: skip
    assert sizes.lengths.longest.response_tokens == 300
    alone = measure(load(DEFAULT, TWO[:2]).plan())
    assert sizes.cuts["actor_update"] == alone.cuts["actor_update"]
    assert [w.flops for w in sizes.work if w.node == "actor_update"] == [alone.work[-1].flops]
    assert sizes.fields["advantages"].num_bytes == alone.fields["advantages"].num_bytes
    assert sizes.fields["l2"].num_bytes > 2.9 * sizes.fields["rollout_log_probs"].num_bytes


def test_rows_that_come_from_both_rollouts_are_as_long_as_the_longer() -> None:
    plan = load(DEFAULT, [*TWO, "nodes.old_logprob.reads={response_ids: r2}"]).plan()
    assert lengths_of(plan).of("old_logprob").response_tokens == 300


@pytest.mark.parametrize("engine", ["transformers", "fake"])
@pytest.mark.parametrize("reader", ["short", "gpt2"])
def test_every_model_that_takes_the_tokens_limits_them(engine: str, reader: str, tmp_path: Path) -> None:
    short = tmp_path / "short"  # 64 positions, and as many words as the other
    shutil.copytree(ASSETS / "arith-tiny", short)
    config = json.loads((short / "config.json").read_text()) | {"vocab_size": 50257}
    (short / "config.json").write_text(json.dumps(config))
    path = short if reader == "short" else reader
    sets = [f"nodes.rollout.engine={engine}", "params.base=gpt2", f"models.reference.path={path}"]
    lengths = lengths_of(load(DEFAULT, sets).plan(), None, 300).longest
    if reader == "gpt2":
        assert (lengths.prompt_tokens, lengths.too_long) == (256, "")
    else:
        assert (lengths.prompt_tokens, lengths.too_long) == (16, "more than the 64 positions of reference")
        assert lengths.prompt_reason == "reference has 64 positions"


def test_a_script_alone_is_limited_by_no_model_and_a_judge_of_texts_limits_nobody(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "from typing import NamedTuple\nfrom flowrl import Node, Sample\nclass Judge(Node):\n    weights = 'reads'\n"
        "    class Out(NamedTuple):\n        judged: Sample[float]\n"
        "    def run(self, response: Sample[str]) -> Out: ...\n"
    )
    sets = [
        "params.base=gpt2", "models.judge={path: arith-tiny}",
        f"nodes.judge={{use: '{tmp_path}/judge.py:Judge', model: judge, pool: train}}",
    ]  # fmt: skip
    assert lengths_of(load(DEFAULT, sets).plan()).longest.prompt_tokens == 256
    alone = load(DEFAULT, ["nodes.rollout.engine=fake"], to_nodes=["reward"]).plan()
    assert lengths_of(alone).longest.prompt_tokens == 256


def test_words_are_not_as_long_as_responses() -> None:
    plan = load(DEFAULT, [*TWO]).plan()
    sizes = measure(plan).fields
    assert sizes["finish_reason"] == replace(sizes["f2"], name="finish_reason")
    assert sizes["f2"].num_bytes == 8 * 257 + 6 * 256
    assert not sizes["f2"].exact
    assert sizes["t2"].num_bytes == 8 * 257 + 4 * 300 * 256


# Batch arithmetic


@given(
    prompts=st.integers(1, 12),
    last=st.integers(1, 12),
    parts=st.integers(1, 3),
    group=st.integers(1, 9),
    ranks=st.integers(1, 9),
    max_tokens=st.none() | st.integers(1, 120),
    lengths=st.builds(Lengths, st.integers(1, 15), st.integers(1, 15)),
)
def test_micro_batches_are_those_of_the_partition(
    prompts: int, last: int, parts: int, group: int, ranks: int, max_tokens: int | None, lengths: Lengths
) -> None:
    last = min(last, prompts)
    cut = passes(
        num_parts=parts, prompts=prompts, last_prompts=last, group=group, ranks=ranks, max_tokens=max_tokens,
        lengths=lengths,
    )  # fmt: skip
    read = fed = 0
    for num_prompts in [last] + [prompts] * (parts - 1):
        same = np.repeat(np.arange(num_prompts), group)
        shared = Prompts(np.full(len(same), lengths.prompt_tokens), same)
        costs = np.full(len(same), lengths.total)
        plans = [plan_micro_batches(costs, ranks, rank, max_tokens, prompts=shared) for rank in range(ranks)]
        read += sum(len(np.unique(same[micro.rows])) for plan in plans for micro in plan)
        fed += sum(len(micro.rows) for plan in plans for micro in plan)
    assert (cut.prompts_read, cut.rows_read) == (read, fed)
    if parts > 1:
        own = [sum(len(micro.rows) for micro in plan if not micro.excluded) for plan in plans]
        assert (min(own), max(own)) == cut.rows_per_rank
        if max_tokens is not None:
            assert {len(plan) for plan in plans} == {cut.num_micro_batches}
            assert max(len(micro.rows) for plan in plans for micro in plan) == cut.rows_per_micro_batch


@pytest.mark.parametrize(
    ("sets", "steps", "rows"),
    [
        ([], 2, (128, 128)),
        (["nodes.actor_update.epochs=3", "nodes.actor_update.minibatch=8"], 12, (64, 64)),
        (["pools.train.workers=3"], 2, (40, 48)),  # groups stay together: long prompts, short responses
        (["pools.train.workers=3", "batch.group=5", "nodes.actor_update.minibatch=32"], 1, (50, 55)),
    ],
)
def test_optimizer_steps_and_rows_of_a_rank(sets: list[str], steps: int, rows: tuple[int, int]) -> None:
    cut = measure(load(DEFAULT, sets).plan()).cuts["actor_update"]
    assert isinstance(cut, Passes)
    assert (cut.num_optimizer_steps, cut.rows_per_rank) == (steps, rows)


def test_updates_per_sync_divide_the_batch() -> None:
    sets = [
        "schedule={mode: separate_async, updates_per_sync: 2, warmup_batches: 3, max_staleness: 2}",
        "pools.generate={shares: null, workers: 3}", "nodes.actor_update.minibatch=8",
    ]  # fmt: skip
    sizes = measure(load(DEFAULT, sets).plan())
    update, rollout, reader = (sizes.cuts[name] for name in ("actor_update", "rollout", "old_logprob"))
    assert isinstance(update, Passes) and isinstance(rollout, Generation) and isinstance(reader, Passes)
    assert (update.num_parts, update.prompts, update.num_optimizer_steps) == (4, 8, 4)
    assert (rollout.num_prompts, rollout.prompts_per_worker) == (32 * 3, (32, 32))
    assert (reader.num_parts, reader.prompts) == (2, 16), "each batch at once"


@pytest.mark.parametrize(
    ("group", "most", "groups", "waves"), [(8, 512, 32, 1), (8, 100, 12, 3), (8, 3, 1, 32), (3, 7, 2, 16)]
)
def test_a_rollout_generates_whole_groups_in_waves(group: int, most: int, groups: int, waves: int) -> None:
    sets = [f"batch.group={group}", f"nodes.rollout.max_sequences={most}"]
    cut = measure(load(DEFAULT, sets).plan()).cuts["rollout"]
    assert isinstance(cut, Generation)
    assert (cut.groups_at_once, cut.sessions_at_once, cut.num_waves) == (groups, groups * group, waves)


# FLOPs


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, head_dim=24, attn_implementation="eager",
        )
    )  # fmt: skip


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=300, n_embd=64, n_layer=3, n_head=4, n_positions=64, attn_implementation="eager")
    )


def mixture() -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=300, hidden_size=64, intermediate_size=160, moe_intermediate_size=64, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2,
            attn_implementation="eager", experts_implementation="eager",
        )
    )  # fmt: skip


def jagged(num: int, group: int, length: int) -> Jagged:
    """Random rows; `group` of them in a row are equal."""
    rows = np.random.default_rng(0).integers(0, 300, (num // group, length))
    return Jagged.of(list(np.repeat(rows, group, axis=0)), np.int64)


@pytest.mark.parametrize("make", [llama, gpt2, mixture])
@pytest.mark.parametrize("trained", [False, True])
def test_flops_are_those_that_torch_counts(make: Any, trained: bool) -> None:
    torch.manual_seed(0)
    model = make()
    architecture = from_config(model.config.to_dict())
    assert isinstance(architecture, Architecture)
    prompts, group, lengths = 3, 4, Lengths(9, 6)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(trained):
        log_probs, _ = token_log_probs(
            model, jagged(prompts * group, group, 9), jagged(prompts * group, 1, 6), temperature=1.0
        )
        if trained:
            log_probs.sum().backward()
    cut = passes(updates=trained, prompts=prompts, last_prompts=prompts, group=group, lengths=lengths)
    work = work_of_passes(cut, "m", architecture, lengths)
    assert isinstance(work.flops, int)
    once_more = (
        trained * 2 * architecture.hidden * architecture.vocabulary * work.num_logits
    )  # not planned: see flops.py
    assert work.flops + once_more == pytest.approx(counter.get_total_flops(), rel=0.04)


def test_attention_grows_with_the_context() -> None:
    architecture = from_config(llama().config.to_dict())
    assert isinstance(architecture, Architecture)

    def attention(prompt: int) -> float:
        whole = work_of_rollout("r", "m", architecture, 1, 1, Lengths(prompt, 1)).flops
        assert isinstance(whole, int)
        return whole - 2 * architecture.num_layer_weights * prompt - 2 * architecture.hidden * architecture.vocabulary

    assert attention(100) == 4 * 3 * 4 * 24 * 100 * 101 / 2
    assert attention(200) == 4 * 3 * 4 * 24 * 200 * 201 / 2


def test_a_script_computes_nothing_and_holds_no_model() -> None:
    plan = load(DEFAULT, ["nodes.rollout.engine=fake"]).plan()
    sizes = measure(plan)
    assert "rollout" not in {work.node for work in sizes.work}
    assert {share.what for share in sizes.memory[0].shares} == {"weights", "gradients", "AdamW", "logits"}


# Memory


class Peak(TorchDispatchMode):
    """Most bytes of large tensors that were alive at the same time."""

    def __init__(self, floor: int) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.floor, self.peak = floor, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() >= self.floor:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.alive:
                    self.alive[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self.alive.pop, storage._cdata, None)
                    self.peak = max(self.peak, sum(self.alive.values()))
        return found


@pytest.mark.parametrize(
    ("dtype", "entropy"),
    [("float32", "none"), ("bfloat16", "none"), ("float32", "value"), ("float32", "gradient")],
)
def test_logits_take_the_bytes_that_are_planned(dtype: str, entropy: Any) -> None:
    rows, tokens, words = 8, 20, 3000
    config = LlamaConfig(
        vocab_size=words, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    trained = entropy != "none"
    prompts, responses = (Jagged.of([np.arange(num)] * rows, np.int64) for num in (6, tokens))
    with torch.inference_mode(not trained), Peak(rows * tokens * words // 2) as peak:
        log_probs, measured = token_log_probs(model, prompts, responses, 1.0, entropy)
        if trained:
            assert measured is not None
            (log_probs.sum() + (measured.sum() if entropy == "gradient" else 0.0)).backward()
    assert peak.peak == pytest.approx(LOGIT_BYTES[dtype] * rows * tokens * words, rel=0.1)


@pytest.mark.parametrize("num_tokens", [300, 900])
def test_logits_take_no_more_for_more_tokens(num_tokens: int) -> None:
    words = SCORES_AT_A_TIME // 100
    hidden, head = torch.randn(num_tokens, 4, requires_grad=True), torch.nn.Linear(4, words, bias=False)
    assert Scoring(1.0).scores_at_a_time == SCORES_AT_A_TIME
    with Peak(SCORES_AT_A_TIME) as peak:
        log_probs, entropies = head_log_probs(
            head, hidden, torch.zeros(num_tokens, dtype=torch.int64), Scoring(1.0, "gradient"), words
        )
        (log_probs.sum() + entropies.sum()).backward()
    assert peak.peak == pytest.approx(LOGIT_BYTES["float32"] * SCORES_AT_A_TIME, rel=0.01)
    share = logits(
        SimpleNamespace(model="policy", name="update", also_reads={}), ModelSpec(path="x"),  # type: ignore[arg-type]
        SimpleNamespace(vocabulary=words, value_head=False),  # type: ignore[arg-type]
        passes(prompts=num_tokens // 6, group=1, max_tokens=10**6), Lengths(4, 6),
    )  # fmt: skip
    assert share is not None and share.num_bytes == peak.peak


@pytest.mark.parametrize("num_tokens", [300, 900])
@pytest.mark.parametrize("top_k", [None, 50])
def test_a_teacher_takes_the_bytes_that_are_planned_and_no_more_for_more_tokens(
    num_tokens: int, top_k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = LOGITS_COMPARED_AT_A_TIME // 100

    def model(hidden: int) -> LlamaForCausalLM:
        sizes = {"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=words, hidden_size=hidden, **sizes))

    monkeypatch.setattr(distilling, "model_of", lambda context: model(16))
    teacher = distilling.Teacher(Context(models={"teacher": ModelSpec(path="x")}, model="teacher"))
    student, rows = model(8), num_tokens // 20
    prompts, responses = (Jagged.of([np.arange(num)] * rows, np.int64) for num in (6, 20))
    with Peak(words * 50) as peak:
        found = distilling.token_divergences(student, teacher, prompts, responses, 1.0, "value", top_k)
        (found[0].sum() + found[2].sum()).backward()
    share = logits(
        SimpleNamespace(model="policy", name="update", also_reads={"teacher": "teacher"}), ModelSpec(path="x"),  # type: ignore[arg-type]
        SimpleNamespace(vocabulary=words, value_head=False),  # type: ignore[arg-type]
        passes(prompts=rows, group=1, max_tokens=10**6), Lengths(6, 20),
    )  # fmt: skip
    assert share is not None and share.num_bytes == pytest.approx(peak.peak, rel=0.1)


def test_a_teacher_costs_its_weights_and_a_forward_pass() -> None:
    """Of two models of the same shape: one trains, the other is read."""
    plan = load(PIPELINES / "distill_on_policy.yaml").plan()
    sizes = measure(plan)
    held = {share.model: share.num_bytes for share in sizes.memory[0].shares if share.what == "weights"}
    assert held["teacher"] == held["policy"]
    flops = {work.node: work.flops for work in sizes.work}
    assert isinstance(flops["actor_update"], int)
    assert flops["actor_update"] == 4 * flops["rollout"]
    adapted = load(PIPELINES / "distill_on_policy.yaml", ["models.policy.lora={}"]).plan()
    kept = {share.model: share.how for share in measure(adapted).memory[0].shares if share.what == "weights"}
    assert kept["teacher"] == "those of policy, its adapter off"


def test_sampling_takes_the_bytes_that_are_planned() -> None:
    sessions, words = 40, 5000
    with Peak(sessions * words) as peak:
        logits = torch.randn(sessions, words).clone()
        sample(logits, np.arange(sessions), np.full(sessions, 0.5), 1.0)
    assert peak.peak <= LOGIT_BYTES_OF_SAMPLING * sessions * words <= 1.4 * peak.peak


PARAMETERS = 7_615_616_512  # of Qwen2.5-7B, as published


@pytest.mark.parametrize("workers", [8, 64])
def test_a_7b_model_needs_what_a_hand_calculation_gives(workers: int) -> None:
    """The arithmetic, written out, of a 7B model; nothing in it is taken from the code."""
    (memory,) = measure(load(BIG, [f"pools.train.workers={workers}"]).plan()).memory
    # The policy is trained in float32 and divided over the workers (fsdp2): 4 B weights, 4 B gradients, 8 B AdamW.
    policy = PARAMETERS * 16 / workers
    # The frozen reference is in bfloat16 and divided, too; the engine of the rollout holds the policy whole, 4 B each.
    reference, engine = PARAMETERS * 2 / workers, PARAMETERS * 4
    held = policy + reference + engine
    # KV cache: 28 layers, keys and values of 4 heads of 128, 4 B each: 114,688 B a token. 128 x 8 = 1024 sessions over
    # the workers, each of 256 prompt and 1024 response tokens.
    cache = 1024 / workers * (256 + 1024) * 114_688
    # Logits over 152,064 words are made for 110 tokens at a time, 64 MiB of them, and there are two copies in float32.
    chunk = 110 * 152_064 * 4 * 2
    assert memory.held == pytest.approx(held, rel=0.1)
    assert memory.at_work["rollout"] == pytest.approx(cache, rel=0.1)
    assert memory.at_work["actor_update"] == memory.at_work["old_logprob"] == pytest.approx(chunk, rel=0.1)
    assert memory.peak == pytest.approx(held + cache, rel=0.1)
    expected = {8: 62.0, 64: 32.5}[workers]  # GiB; 80 are there
    assert memory.peak / GIB == pytest.approx(expected, rel=0.1)
    assert memory.limit == 80 * 2**30


def test_a_7b_model_whole_on_each_worker_is_four_times_its_weights_and_the_engine() -> None:
    (memory,) = measure(load(BIG, ["models.policy.parallel=ddp", "pools.train.memory_per_worker=200"]).plan()).memory
    assert memory.held == pytest.approx(PARAMETERS * (4 + 4 + 8 + 4) + PARAMETERS * 2 / 8, rel=0.001)


def test_a_weight_sync_sends_the_weights_once_to_every_engine() -> None:
    (sync,) = measure(load(BIG).plan()).syncs
    assert (sync.num_bytes, dict(sync.receivers)) == (PARAMETERS * 4, {"train": 8})


def test_a_weight_sync_sends_the_type_of_the_engine() -> None:
    sets = ["nodes.rollout.engine=vllm", "nodes.rollout.engine_options={dtype: bfloat16}"]
    (sync,) = measure(load(BIG, sets).plan()).syncs
    assert sync.num_bytes == PARAMETERS * 2


def test_the_flops_of_a_7b_step_are_two_for_each_weight_and_token() -> None:
    """7.07 billion weights are multiplied with each token (7.62 without the input embedding of 0.54)."""
    work = {each.node: each for each in measure(load(BIG).plan()).work}
    tokens = 128 * 2 * 256 + 1024 * 1024  # the 8 rows of a prompt lie on one worker, in two micro-batches of at most 7
    attention = 4 * 28 * 28 * 128 * (128 * 2 * (256 * 257 / 2) + 1024 * (1024 * 256 + 1024 * 1025 / 2))
    forward = 2 * (PARAMETERS - 152_064 * 3584) * tokens + attention
    assert work["old_logprob"].flops == pytest.approx(forward, rel=0.05)
    assert work["actor_update"].flops == pytest.approx(3 * forward, rel=0.05)


def test_a_model_of_unknown_size_is_said_to_be_unknown() -> None:
    sizes = measure(load(BIG, ["params.base=nobody/nothing"]).plan())
    assert all(isinstance(model, Unknown) for model in sizes.models.values())
    assert all(isinstance(work.flops, Unknown) for work in sizes.work)
    assert sizes.memory[0].shares == ()
    assert set(sizes.memory[0].unknown) == {"policy", "reference"}
    assert isinstance(sizes.syncs[0].num_bytes, Unknown)


def test_two_rollouts_of_one_model_share_an_engine_unless_they_ask_for_different_ones() -> None:
    val = "nodes.val={use: rollout.generate, model: policy, pool: generate, max_tokens: 4, writes: {%s}%s}"
    names = ["prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "policy_version", "response",
             "finish_reason", "num_turns", "temperature", "max_tokens"]  # fmt: skip
    writes = ", ".join(f"{name}: val_{name}" for name in names)
    for extra, engines in (("", 1), (", max_sequences: 4", 2)):
        (memory,) = measure(load(DEFAULT, [val % (writes, extra)]).plan()).memory
        (engine,) = [share for share in memory.shares if share.what == "engine"]
        assert engine.num_bytes == engines * 661_632 * 4
